"""What becomes of a command whose reader has left, or whose stream is closed or full."""

from __future__ import annotations

import os
import pty
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import LORA_FS, LoraFs

Folder = Callable[[int], str]


@pytest.fixture
def unread() -> Iterator[int]:
    """The writing end of a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.fixture
def one(lora_fs: LoraFs, folder: Folder) -> LoraFs:
    """A registry with ``a``."""
    assert lora_fs("register", "a", folder(1)).code == 0
    return lora_fs


@pytest.mark.parametrize(
    "words", ["list", "show a", "status -o json", "doctor", "--help", "--version", "register --help"]
)
def test_a_reader_that_leaves(one: LoraFs, unread: int, words: str) -> None:
    """``lora-fs list | head -0`` ends without a word on stderr, and is no failure."""
    ran = subprocess.run(
        [LORA_FS, *words.split()], stdout=unread, stderr=subprocess.PIPE, check=False, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


@pytest.mark.parametrize(("words", "code"), [("lsit", 2), ("list --al", 2), ("show b", 3)])
def test_nobody_reads_what_went_wrong(one: LoraFs, unread: int, words: str, code: int) -> None:
    """The exit code is the one it would have been."""
    ran = subprocess.run([LORA_FS, *words.split()], stdout=unread, stderr=unread, check=False, timeout=60)
    assert ran.returncode == code


@pytest.mark.parametrize(
    ("words", "code"), [("list", 0), ("validate {source}", 0), ("register b {source}", 0), ("show c", 3)]
)
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_stream(one: LoraFs, folder: Folder, words: str, code: int, closed: str) -> None:
    """``lora-fs register … >&-`` does its work; the other stream gets what is its own."""
    redirect = {"stdout": ">&-", "stderr": "2>&-"}[closed]
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", LORA_FS]
    ran = subprocess.run(
        [*command, *words.format(source=folder(2)).split()], capture_output=True, check=False, timeout=60
    )
    assert ran.returncode == code, ran
    assert bool(ran.stdout) is (code == 0 and closed == "stderr")
    assert bool(ran.stderr) is (code != 0 and closed == "stdout")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_stream_that_is_full(one: LoraFs) -> None:
    """A result that cannot be written is a failure, said in one line."""
    with open("/dev/full", "wb") as full:
        ran = subprocess.run([LORA_FS, "list"], stdout=full, stderr=subprocess.PIPE, check=False, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr == b"lora-fs: No space left on device\n"


def test_a_terminal_is_not_told_what_to_do(one: LoraFs, root: Path) -> None:
    """The volume's file names are other people's text: on a terminal they are shown escaped."""
    (root / ".replicas" / "\x1b[2J.json").write_text("{")
    ours, terminal = pty.openpty()
    for words in ("gc", "status", "promote a v1 --wait 0"):
        subprocess.run([LORA_FS, *words.split()], stdout=terminal, stderr=terminal, check=False, timeout=60)
    os.close(terminal)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert b"\x1b[2J" not in shown
    assert shown.count(rb"\x1b[2J") == 3


@pytest.mark.parametrize("words", ["validate {source}", "register b {source}"])
def test_no_bar_in_a_log(one: LoraFs, folder: Folder, words: str) -> None:
    """Where stderr is no terminal nothing is drawn, whatever colours are asked for."""
    ran = subprocess.run(
        [LORA_FS, *words.format(source=folder(2)).split()],
        env={**os.environ, "FORCE_COLOR": "1"},
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
