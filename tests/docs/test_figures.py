"""A figure that several pages give is the same on each: that of the page that measured it."""

from __future__ import annotations

import re

from tests.docs.blocks import PAGES, ROOT

PERFORMANCE = (ROOT / "docs/performance.md").read_text()
SIZING = (ROOT / "docs/howto/sizing.md").read_text()


def row(number: int) -> str:
    """The measured cell of one of the numbers of the performance page."""
    (cell,) = re.findall(rf"^\| {number} \| [^|]* \| ([^|]*) \|", PERFORMANCE, re.MULTILINE)
    return str(cell)


def test_what_the_proxy_adds() -> None:
    """Wherever a page says what it adds to an answer, it is number 3."""
    told = {}
    for page in PAGES:
        if not page.is_relative_to(ROOT / "docs/lab"):
            text = " ".join(page.read_text().split())
            if found := re.findall(r"([\d.]+ ms)(?: to the median answer)?, (1\.\d+×) slower", text):
                told[page.name] = [", ".join(one) + " slower" for one in found]
    assert told.keys() >= {"performance.md", "why.md", "README.md"}
    assert {figure for figures in told.values() for figure in figures} == {row(3)}


def test_what_a_sidecar_takes() -> None:
    """The formula fits what was measured, and whoever sizes a pod elsewhere reads the same formula."""
    ((base, each),) = re.findall(
        r"^\| sidecar's memory \| (\d+) MB \+ (\d+) kB an adapter", SIZING, re.MULTILINE
    )
    ((one, many),) = re.findall(r"(\d+) MB with one adapter.*?(\d+) MB with 10,000", SIZING, re.DOTALL)
    assert row(11).endswith(f", {many} MB")
    assert f"[{one} MB](howto/sizing.md" in (ROOT / "docs/why.md").read_text()
    for adapters, measured in ((1, int(one)), (10_000, int(many))):
        assert measured <= int(base) + adapters * int(each) / 1000 <= 1.1 * measured
    values = (ROOT / "examples/helm/lora-fs/values.yaml").read_text()
    assert f"About {base} MB and {each} kB an adapter" in values
    scaling = (ROOT / "docs/scaling.md").read_text()
    assert f"[{base} MB and {each} kB an adapter](howto/sizing.md" in scaling


def test_a_benchmark_runs_the_command_of_its_own_environment() -> None:
    """`make bench` names the environment's Python and has its folder not on PATH."""
    scripts = {path.name: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    assert "bench_apply.py" in scripts
    assert [name for name, text in scripts.items() if re.search(r'\[\s*"lora-fs",', text)] == []
