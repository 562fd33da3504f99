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


def test_a_table_is_one_write(one: LoraFs, folder: Folder) -> None:
    """Not one a row: a pipe that keeps writes apart has all rows in its first."""
    assert one("register", "b", folder(2)).code == 0
    read, write = os.pipe2(os.O_DIRECT)
    try:
        subprocess.run([LORA_FS, "list"], stdout=write, check=True, timeout=60)
        assert len(os.read(read, 4096).splitlines()) == 3
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("words", ["list", "doctor", "--help", "--version", "register --help"])
def test_a_reader_that_leaves(one: LoraFs, unread: int, words: str) -> None:
    """``lora-fs list | head -0`` ends without a word on stderr, and is no failure."""
    ran = subprocess.run(
        [LORA_FS, *words.split()], stdout=unread, stderr=subprocess.PIPE, check=False, timeout=60
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_an_export_that_nobody_takes(one: LoraFs, unread: int) -> None:
    """``lora-fs export - | ssh backup …`` that breaks off is a failure: what arrived is no backup."""
    ran = subprocess.run(
        [LORA_FS, "export", "-"], stdout=unread, stderr=subprocess.PIPE, check=False, timeout=60, text=True
    )
    assert ran.returncode == 1
    assert "left before its end" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(("words", "code"), [("lsit", 2), ("show b", 3)])
def test_nobody_reads_what_went_wrong(one: LoraFs, unread: int, words: str, code: int) -> None:
    """The exit code is the one it would have been."""
    ran = subprocess.run([LORA_FS, *words.split()], stdout=unread, stderr=unread, check=False, timeout=60)
    assert ran.returncode == code


@pytest.mark.parametrize(("words", "code"), [("list", 0), ("register b {source}", 0), ("show c", 3)])
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
    assert ran.stderr == b"lora-fs: cannot write the output: No space left on device\n"


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


def test_no_bar_on_a_terminal_without_a_cursor(one: LoraFs, folder: Folder) -> None:
    """As an editor's shell: the bar would leave an empty line there."""
    ours, terminal = pty.openpty()
    words, dumb = [LORA_FS, "register", "b", folder(3)], {**os.environ, "TERM": "dumb"}
    subprocess.run(words, env=dumb, stdout=terminal, stderr=terminal, check=True, timeout=60)
    os.close(terminal)
    shown = os.read(ours, 1 << 16)
    os.close(ours)
    assert shown == b"registered b@v1 in default/tiny\r\n"


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


def test_an_export_to_a_closed_stream(one: LoraFs) -> None:
    """``lora-fs export - >&-`` is refused: there would be no backup, and 0 would say that there is one."""
    command = ["sh", "-c", 'exec "$@" >&-', "sh", LORA_FS, "export", "-"]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=60, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "with - the export is written to stdout, and that is closed" in ran.stderr


@pytest.mark.parametrize("words", ["show b", "show b@東京"])
def test_a_stream_without_the_characters(one: LoraFs, folder: Folder, words: str) -> None:
    """What an encoding lacks is escaped: a label in another script is no reason to fail."""
    assert one("register", "b", folder(2), "--label", "city=Zürich–東京").code == 0
    ran, whole = (
        subprocess.run(
            [LORA_FS, *words.split()],
            env={**os.environ, "PYTHONIOENCODING": name},
            capture_output=True,
            check=False,
            timeout=60,
        )
        for name in ("latin-1:strict", "utf-8")
    )
    assert ran.returncode == whole.returncode
    assert b"Traceback" not in ran.stderr
    for narrow, wide in ((ran.stdout, whole.stdout), (ran.stderr, whole.stderr)):
        assert narrow == wide.decode().encode("latin-1", "backslashreplace")
