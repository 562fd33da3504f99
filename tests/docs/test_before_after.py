"""A benchmark that runs in turns in two checkouts tells which row is worse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "before_after.py"


def checkout(folder: Path, warm_ms: float, stock_ms: float = 10.0, *, runs: Path | None = None) -> Path:
    """One whose benchmark prints a table of ``figures.table``'s, with an environment that runs ``runs``."""
    package = (runs or folder) / "lora_fs" / "sidecar"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("")
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    base = Path(sys.base_prefix) / "bin" / "python3"
    start = f'#!/bin/sh\nPYTHONPATH={runs or folder} exec {base} "$@"\n'
    python.write_text(start)
    python.chmod(0o755)
    (folder / "benchmarks").mkdir()
    (folder / "benchmarks" / "before_after.py").write_text(SCRIPT.read_text())
    figures = ROOT / "benchmarks" / "figures.py"
    (folder / "benchmarks" / "figures.py").write_text(figures.read_text())
    (folder / "benchmarks" / "bench.py").write_text(
        "import sys; from pathlib import Path\n"
        "sys.path.insert(0, str(Path(__file__).parent)); from figures import table\n"
        f"table([('warm: stock', [{stock_ms}]), ('warm: plugin', [{warm_ms}])], 'ms')\n"
    )
    return folder


def in_turns(before: Path, after: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(after / "benchmarks/before_after.py"), "bench.py", "--before", str(before)]
    return subprocess.run([*command, "--turns", "2"], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("after_ms", "code"), [(10.2, 0), (9.0, 0), (10.4, 1)])
def test_what_is_slower_by_more_than_three_percent_is_told(
    tmp_path: Path, after_ms: float, code: int
) -> None:
    """And a stock engine that was slower is not: it is the machine."""
    before = checkout(tmp_path / "before", 10.0)
    done = in_turns(before, checkout(tmp_path / "after", after_ms, stock_ms=20.0))
    assert done.returncode == code, done.stderr
    assert f"| warm: plugin | 10.00 | {after_ms:.2f} | {after_ms / 10:.3f} |" in done.stdout
    assert ("worse by more than 3 %: warm: plugin" in done.stdout) == bool(code)
    assert "worse by more than 3 %: warm: stock" not in done.stdout


def test_a_checkout_that_runs_anothers_code_is_refused(tmp_path: Path) -> None:
    """Its figures would be the other one's."""
    after = checkout(tmp_path / "after", 10.0)
    before = checkout(tmp_path / "before", 10.0, runs=tmp_path / "after")
    done = in_turns(before, after)
    assert done.returncode == 1
    assert f"the environment of {before} runs {after}" in done.stderr


def test_a_checkout_without_an_environment_is_refused(tmp_path: Path) -> None:
    done = in_turns(tmp_path, checkout(tmp_path / "after", 10.0))
    assert done.returncode == 1
    assert f"{tmp_path} has no environment: run `make env` there" in done.stderr
