"""Every block of every page is run or checked: what a reader types works, what a reader copies is valid.

Commands are run as a reader would, page by page (``reader.py``). What needs a cluster, a network or an engine
is parsed: its verbs, options, files and names exist. What is neither stands in ``LEFT`` with its reason.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.volume import doctor
from lora_fs.sidecar.registry.volume import atomic
from tests.cli.conftest import parse
from tests.cli.test_doctor import BRIEF
from tests.cli.test_examples import INTERRUPTED
from tests.docs.blocks import ALL, CONSOLE, PAGES, ROOT, Block, Command, blocks, commands, told
from tests.docs.parsed import PARSED, fetched, fetches
from tests.docs.reader import FILES, Reader, shows

KINDS = {"console", "json", "yaml", "text", ""}

# Pages that other tests type: tests/cli/test_examples.py what the help says, tests/e2e/test_tutorials.py
# the tutorials, on real engines.
TUTORIALS = {str(page.relative_to(ROOT)) for page in (ROOT / "docs/tutorials").iterdir()}
BY_OTHERS = {"docs/cli.md", *TUTORIALS}
# Real engines, or several replicas: tests/e2e/test_demo.py, test_release.py and tests/gateway run them.
BY_E2E = {("lora-fs", "demo"), ("lora-fs", "evaluate"), ("lora-fs", "gateway")}
# What a page's reader did before.
REGISTERED = "lora-fs register support ./support-lora"
BEFORE = {
    "README.md": ["lora-fs sidecar --replica-id a", "lora-fs sidecar --replica-id b"],
    "examples/local/README.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/apply.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/back-out.md": [REGISTERED],
    "docs/howto/backup.md": [REGISTERED],
    "docs/howto/canary.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/dashboard.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/drop-a-folder.md": ["lora-fs sidecar"],
    "docs/howto/evaluate.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/fleet.md": ["lora-fs sidecar", REGISTERED],
    "docs/howto/migrate.md": [REGISTERED],
    "docs/howto/register-and-roll-back.md": ["lora-fs sidecar"],
    "docs/howto/reinforcement-learning.md": [
        "mkdir -p /adapters/out && cp -r ./support-lora /adapters/out/policy-v7"
    ],
    "docs/howto/sources.md": ["lora-fs sidecar"],
    "docs/howto/security.md": [REGISTERED],
    "docs/howto/troubleshooting.md": [REGISTERED],
}
# Neither run nor parsed: page or command → why.
LEFT: dict[str, str] = {}


def name(page: Path) -> str:
    """A page, as the tables above call it."""
    return str(page.relative_to(ROOT))


def program(line: str) -> tuple[str, list[str]]:
    """The program that a line runs, its folder left out, and its words; variables before it are left out."""
    words = shlex.split(line)
    while re.match(r"[A-Z_]+=", words[0]):
        if len(words) == 1:
            return "export", words
        words.pop(0)
    return words[0].rpartition("/")[2], words[1:]


@pytest.fixture
def reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Reader]:
    monkeypatch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
    monkeypatch.setattr(doctor, "QUICK", BRIEF)
    monkeypatch.setattr(doctor, "FULL", BRIEF)
    with contextlib.ExitStack() as stack:
        yield Reader(tmp_path, monkeypatch, capsys, stack)


def watches(words: list[str]) -> bool:
    """Whether a command goes on until its user is done."""
    return bool({"--watch", "--follow"} & set(words)) or (words[:1] == ["top"] and "--once" not in words)


@contextlib.contextmanager
def leaving(done: bool) -> Iterator[None]:
    """Press Ctrl-C at the first pause, of the command and of nothing that runs beside it."""
    sleep = time.sleep

    def press(seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        sleep(seconds)

    with pytest.MonkeyPatch.context() as patch:
        if done:
            patch.setattr(time, "sleep", press)
        yield


def tried(command: Command, reader: Reader) -> None:
    """Run it or parse it, and compare what it prints with what the page shows."""
    runs, words = program(command.text)
    if command.text in LEFT:
        return
    if (runs, *words[:1]) in BY_E2E:
        parse(words)
        return
    if fetches(command.text):
        fetched(command.text)
        return
    if runs in PARSED:
        PARSED[runs](words)
        return
    assert runs in {*FILES, "curl", "export"}, f"{command.block}: {runs} is not known here"
    with leaving(watches(words)):
        code, out = reader.types(command.text)
    if words[:1] == ["status"]:  # a report follows within a moment, and readers type slowly
        end = time.monotonic() + 10
        while not all(shows(line, out) for line in command.prints) and time.monotonic() < end:
            code, out = reader.types(command.text)
    line = f"{command.block}: $ {command.text}"
    assert code == (INTERRUPTED if watches(words) else 0), f"{line}\nends with {code}\n{out}"
    for shown in command.prints:
        assert shows(shown, out), f"{line}\nprints no line like\n{shown}\nbut\n{out}"


@pytest.mark.parametrize("page", sorted({block.page for block in CONSOLE}), ids=name)
def test_a_reader_can_type_it(page: Path, reader: Reader) -> None:
    """Every command of the page, from its top to its end, in one session."""
    if name(page) in BY_OTHERS | LEFT.keys():
        return
    for line in BEFORE.get(name(page), []):
        assert reader.types(line)[0] == 0, line
    for block in CONSOLE:
        if block.page == page:
            for command in commands(block):
                tried(command, reader)


def test_the_tables_are_in_use() -> None:
    """No entry outlives the page or the command that it is about."""
    lines = {command.text for block in CONSOLE for command in commands(block)}
    assert LEFT.keys() <= lines | {name(page) for page in PAGES}
    assert BEFORE.keys() | BY_OTHERS <= {name(page) for page in PAGES}


@pytest.mark.parametrize("block", told("") + told("text"))
def test_no_command_hides_in_another_block(block: Block) -> None:
    """A command stands in a console block, where it is run."""
    assert not re.search(r"^\$ ", block.text, re.MULTILINE)


def test_every_block_is_of_a_kind_that_is_tried() -> None:
    """A block of another language is one that nothing here looks at."""
    assert {block.language for block in ALL} <= KINDS


# -- the checks have teeth -------------------------------------------------------------------------


def console(text: str) -> Block:
    """A block as a page might have it."""
    return Block(ROOT / "README.md", 1, "console", text)


def test_blocks_and_commands_are_found() -> None:
    """In lists, with marks, over several lines; what is printed belongs to its command."""
    text = "<!-- schema: head -->\n```json\n{}\n```\n"
    text += "- x\n\n  ```console\n  $ a \\\n    b  # c\n  d\n  $ e 'f\n  g'\n  ```\n"
    first, second = blocks(ROOT / "README.md", text)
    assert (first.mark, first.language, first.text, first.line) == ("schema: head", "json", "{}\n", 2)
    assert [(c.text, c.prints) for c in commands(second)] == [("a   b", ("d",)), ("e 'f\ng'", ())]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense --now",
        "kubectl apply -f nowhere.yaml",
        "kubectl exec p -- lora-fs nonsense",
        "kubectl apply --nonsense",
        "kubectl exec deploy/nonsense -- lora-fs status",
        "kubectl exec p -c nonsense -- lora-fs status",
        "make nonsense",
        "python benchmarks/bench_idle.py --nonsense",
        "lora-fs list --nonsense",
        "lora-fs show nobody",
        "curl localhost:8001/nonsense/at/all",
        "cp nothing nowhere",
        "vllm serve m --nonsense",
        "helm install x nowhere",
        "pip install '.[nonsense]'",
    ],
)
def test_what_does_not_work_fails(line: str, reader: Reader) -> None:
    """A command that a reader could not run is one that fails here."""
    (command,) = commands(console(f"$ {line}\n"))
    with pytest.raises((AssertionError, click.UsageError)):
        tried(command, reader)


def test_what_is_not_printed_fails(reader: Reader) -> None:
    """Numbers may differ, words may not."""
    (command,) = commands(
        console("$ lora-fs register support ./support-lora\nregistered support@v1 in x/y\n")
    )
    with pytest.raises(AssertionError, match="prints no line like"):
        tried(command, reader)


@pytest.mark.parametrize(
    ("shown", "told", "same"),
    [
        ("a  b 3 s", "a b 17 s", True),
        ("a b 3 s", "a c 3 s", False),
        ("{…}", '{"x": 1}', True),
        ("a", "b\na\n", True),
        ("a b", "ab", False),
    ],
)
def test_lines_are_compared(shown: str, told: str, same: bool) -> None:
    """Column widths and numbers are the machine's."""
    assert shows(shown, told) is same
