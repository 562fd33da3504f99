"""The command as a shell runs it: help, completion, signals, a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.main import cli
from tests.cli.conftest import LORA_FS, LoraFs, interruptible, propose


def test_help_of_every_command(lora_fs: LoraFs) -> None:
    """Exit 0, and every option is explained."""
    for name, command in cli.commands.items():
        ran = lora_fs(name, "--help")
        assert ran.code == 0
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[0] in ran.out
                assert option.help, (name, option.name)
        assert "Examples:" in ran.out or "Example:" in ran.out
        assert ("LORA_FS_MODEL" in ran.out) is (name not in {"demo", "version", "help"})


@pytest.mark.parametrize("name", ["init", "sign", "unregister", "validate", "verify"])
def test_help_and_page_say_the_same(lora_fs: LoraFs, name: str) -> None:
    """The first sentence of a command's help begins its section, word for word."""
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    (section,) = re.findall(rf"^## {name}\n\n`[^`]*`\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    shown = " ".join(lora_fs(name, "--help").out.split("\n\n")[1].split())
    assert " ".join(section.replace("`", "").split()).startswith(shown.partition(". ")[0])
    assert "someone who may" not in shown


def test_help_of_the_group(lora_fs: LoraFs) -> None:
    """It tells each option's variable, the exit codes, and how to get completion."""
    text = lora_fs("--help").out
    words = "LORA_FS_ROOT LORA_FS_NAMESPACE LORA_FS_MODEL LORA_FS_BASE_CONFIG 130 bash_source zsh_source"
    assert [word for word in [*words.split(), "fish_source"] if word not in text] == []


def test_an_unknown_command(lora_fs: LoraFs) -> None:
    """A usage error."""
    ran = lora_fs("regsiter")
    assert ran.code == 2
    assert "regsiter" in ran.err


def test_an_option_of_the_registry_behind_the_command(
    lora_fs: LoraFs, root: Path, folder: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts there as before the command, and wins over one before it and over the variable."""
    monkeypatch.setenv("LORA_FS_ROOT", str(root.parent / "another"))
    behind = ("--root", str(root), "--model", "tiny", "-n", "team-a")
    assert lora_fs("-n", "team-b", "register", "sql", folder(1), *behind).code == 0
    assert lora_fs("list", "-o", "name", *behind).out == "sql\n"
    assert lora_fs("-n", "team-a", "list", *behind[:2], "-o", "name").out == "sql\n"
    assert lora_fs("list", *behind[:2], "-A", "-o", "name").out == "team-a/sql\n"
    ran = lora_fs("unregister", "sql", *behind, "-n", "team-b")
    assert (ran.code, "unregister works in one namespace" in ran.err) == (2, True)


def test_an_unknown_option(lora_fs: LoraFs) -> None:
    """A usage error that names it."""
    ran = lora_fs("list", "--al")
    assert ran.code == 2
    assert "--al" in ran.err


def test_a_variable_that_cannot_be_read(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, with what it holds."""
    monkeypatch.setenv("LORA_FS_PORT", "many")
    ran = lora_fs("list")
    assert ran.code == 2
    assert "LORA_FS_PORT=many" in ran.err


def test_an_empty_token_file_is_not_none(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that a manifest left out would open what it was to close."""
    monkeypatch.setenv("LORA_FS_TOKEN_FILE", "")
    ran = lora_fs("sidecar")
    assert ran.code == 2
    assert "LORA_FS_TOKEN_FILE is empty" in ran.err


def test_an_empty_root_is_not_the_folder_one_is_in(lora_fs: LoraFs) -> None:
    """``--root "$UNSET"`` is a mistake, not the working directory."""
    ran = lora_fs("--root", "", "list")
    assert ran.code == 2
    assert "is a variable unset?" in ran.err


def test_no_model(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to give one."""
    monkeypatch.delenv("LORA_FS_MODEL")
    ran = lora_fs("list")
    assert ran.code == 2
    assert "LORA_FS_MODEL" in ran.err


def test_no_root(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to give one."""
    monkeypatch.delenv("LORA_FS_ROOT")
    ran = lora_fs("list")
    assert ran.code == 2
    assert "LORA_FS_ROOT" in ran.err


def test_dynamos_variable(lora_fs: LoraFs, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DYNAMO_LORA_PATH names the root where LORA_FS_ROOT does not."""
    monkeypatch.setenv("DYNAMO_LORA_PATH", str(root))
    monkeypatch.delenv("LORA_FS_ROOT")
    assert str(root) in lora_fs("init").out


def complete(words: str, incomplete: str, shell: str = "bash") -> list[str]:
    """What a shell would propose after ``words``."""
    environment = {
        **os.environ,
        "_LORA_FS_COMPLETE": f"{shell}_complete",
        "COMP_WORDS": f"lora-fs {words} {incomplete}".rstrip(),
        "COMP_CWORD": incomplete if shell == "fish" else str(len(words.split()) + 1),
    }
    ran = subprocess.run([LORA_FS], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert not ran.stderr
    if shell == "zsh":
        return ran.stdout.splitlines()[1::3]
    return [line.partition(",")[2].partition("\t")[0] for line in ran.stdout.splitlines() if line]


@pytest.fixture
def three(lora_fs: LoraFs, folder: Callable[[int], str]) -> LoraFs:
    """``support`` with v1 and v2, ``billing``, and ``gone``, which was unregistered."""
    for name, seed in (("support", 1), ("support", 2), ("billing", 3), ("gone", 4)):
        assert lora_fs("register", name, folder(seed)).code == 0
    lora_fs("unregister", "gone")
    return lora_fs


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_in_a_shell(three: LoraFs, shell: str) -> None:
    """Names come from the registry, in each shell."""
    assert complete("promote", "su", shell) == ["support"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str, lora_fs: LoraFs) -> None:
    """Each shell gets its script, which calls the command by its name."""
    environment = {**os.environ, "_LORA_FS_COMPLETE": f"{shell}_source"}
    ran = subprocess.run([LORA_FS], env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert "lora-fs" in ran.stdout


def test_completion(three: LoraFs) -> None:
    """Commands, registered names, revisions of the name, and codes are proposed."""
    assert propose("pro") == ["promote"]
    for command in ("promote", "unregister", "show", "rollback", "register"):
        assert propose(command, "") == ["billing", "support"]
    assert propose("show", "su") == ["support"]
    assert propose("promote", "support", "") == ["v1", "v2"]
    assert propose("unregister", "support", "--revision", "v") == ["v1", "v2"]
    assert propose("promote", "gone", "") == []
    assert "dora" in propose("validate", "--allow", "d")


def test_completion_of_a_revision(three: LoraFs) -> None:
    """Behind ``NAME@``, of each command that takes a revision; other commands propose nothing."""
    for command in ("promote", "unregister", "show", "get", "status", "list", "wait", "canary"):
        assert propose(command, "support@") == ["support@v1", "support@v2"]
    assert propose("show", "support@v2") == ["support@v2"]
    assert propose("show", "gone@") == propose("show", "nobody@") == []
    assert propose("show", "support@x") == []


@pytest.fixture
def bash(root: Path) -> Iterator[int]:
    """The terminal of an interactive bash that has the completion."""
    ours, theirs = pty.openpty()
    path = f"{Path(LORA_FS).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "dumb", "PS1": "$ "}
    shell = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        start_new_session=True,
    )
    os.close(theirs)
    os.write(ours, b'eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)"; echo is${NOTHING}there\n')
    try:
        read_until(ours, "isthere")
        yield ours
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def read_until(terminal: int, word: str, timeout_s: float = 60) -> str:
    """What a terminal shows, to the first ``word``."""
    shown, ends = "", time.monotonic() + timeout_s
    while word not in shown:
        assert select.select([terminal], [], [], max(0, ends - time.monotonic()))[0], shown
        shown += os.read(terminal, 4096).decode(errors="replace")
    return shown


@pytest.mark.parametrize("breaks", [True, False], ids=["@-is-a-break", "@-is-none"])
def test_bash_completes_a_revision(three: LoraFs, bash: int, breaks: bool) -> None:
    """Whether or not COMP_WORDBREAKS has the ``@``: bash then hands over one word as three."""
    if not breaks:
        os.write(bash, b"COMP_WORDBREAKS=${COMP_WORDBREAKS//@}\n")
    for typed, completed in (
        ("show billing@", "show billing@v1 "),
        ("get billing@v", "get billing@v1 "),
        ("promote support@v2 --min-r", "promote support@v2 --min-replicas "),
        ("promote billing v", "promote billing v1 "),
    ):
        os.write(bash, f"lora-fs {typed}\t".encode())
        read_until(bash, completed)
        os.write(bash, b"\x01echo [\x05]\n")
        read_until(bash, f"[lora-fs {completed.rstrip()} ]")


def test_completion_of_another_registry(three: LoraFs, root: Path) -> None:
    """Options before the command count."""
    assert propose("--namespace", "team-b", "show", "") == []
    assert propose("--root", str(root), "--model", "tiny", "show", "b") == ["billing"]
    assert propose("--root", str(root.parent), "show", "") == []


def test_completion_is_silent(
    three: LoraFs, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the registry cannot be read nothing is proposed, and nothing is said."""
    root.rename(root.with_name("gone"))
    assert complete("show", "su") == []
    assert propose("promote", "support", "") == []
    monkeypatch.setenv("LORA_FS_PORT", "many")
    assert propose("show", "") == []
    monkeypatch.delenv("LORA_FS_ROOT")
    assert propose("show", "") == []
    assert capsys.readouterr().err == ""


def test_completion_of_a_damaged_record(three: LoraFs, root: Path) -> None:
    """A name whose record cannot be read is still one to type."""
    (record,) = (root / "default" / "tiny" / "v1").glob("billing.@*.json")
    record.write_text("garbage")
    assert propose("show", "b") == ["billing"]


def test_words_that_are_not_utf_8(root: Path, lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """They are refused or told escaped; no traceback."""
    lora_fs("register", "a", folder(1))
    for words in (
        [b"show", b"\xff"],
        [b"register", b"a", b"\xff"],
        [b"register", b"b", folder(2).encode(), b"--label", b"k=\xff"],
    ):
        ran = subprocess.run([LORA_FS, *words], capture_output=True, text=True, check=False, timeout=60)
        assert ran.returncode in (2, 3), ran
        assert r"\udcff" in ran.stderr.splitlines()[-1]
        assert "Traceback" not in ran.stderr


@pytest.mark.parametrize("words", [["register", "a"], ["validate"]])
def test_a_bar_on_a_terminal(root: Path, folder: Callable[[int], str], words: list[str]) -> None:
    """Reading is shown on a terminal's stderr; stdout is the result alone."""
    ours, theirs = pty.openpty()
    ran = subprocess.run(
        [LORA_FS, *words, folder(1)], stdout=subprocess.PIPE, stderr=theirs, text=True, check=True, timeout=60
    )
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert "reading lora-1" in shown
    assert len(ran.stdout.splitlines()) == 1
    assert "reading" not in ran.stdout


def interrupt(
    words: list[str], until: Callable[[subprocess.Popen[str]], object], by: signal.Signals = signal.SIGINT
) -> tuple[int, str]:
    """Run a command, send it the signal once ``until`` returns; its exit code and stderr."""
    with interruptible():
        running = subprocess.Popen(
            [LORA_FS, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    with running:
        try:
            until(running)
            running.send_signal(by)
            _, stderr = running.communicate(timeout=60)
        finally:
            running.kill()
    return running.returncode, stderr.strip()


def first_line(running: subprocess.Popen[str]) -> None:
    """Return once the command has said something."""
    assert running.stdout is not None
    assert running.stdout.readline()


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM], ids=lambda by: by.name)
def test_ctrl_c(root: Path, lora_fs: LoraFs, folder: Callable[[int], str], by: signal.Signals) -> None:
    """It ends what watches with 130 and one line; so does the signal that ends a Job's pod."""
    lora_fs("register", "a", folder(1))
    assert interrupt(["status", "--watch"], first_line, by) == (130, "lora-fs: interrupted")


def test_a_containers_first_process_ends(root: Path, lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """The kernel keeps signals from it that it does not handle."""
    lora_fs("register", "a", folder(1))
    first = subprocess.Popen(
        ["unshare", "--user", "--map-root-user", "--pid", "--kill-child", LORA_FS, "status", "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with first:
        try:
            first_line(first)
            (inside,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
            os.kill(int(inside), signal.SIGTERM)
            assert first.communicate(timeout=60)[1].strip() == "lora-fs: interrupted"
        finally:
            first.kill()


def test_ctrl_c_while_waiting(
    lora_fs: LoraFs, folder: Callable[[int], str], report: Callable[..., None]
) -> None:
    """What was written stays written, and was told before the wait."""
    lora_fs("register", "b", folder(2))
    report("slow")
    ran = interrupt(["register", "a", folder(1), "--wait", "60"], first_line)
    assert ran == (130, "lora-fs: interrupted")
    assert lora_fs("list", "-o", "name").out == "a\nb\n"


def test_ctrl_c_while_copying(lora_fs: LoraFs, folder: Callable[[int], str], root: Path) -> None:
    """Nothing is registered, and the half copy is gone."""
    lora_fs("register", "other", folder(0))
    source = Path(folder(1))
    with a_copy_ended_by(KeyboardInterrupt):
        assert lora_fs("register", "a", str(source)).code == 130
    assert lora_fs("list", "-o", "name").out == "other\n"
    assert list((root / "default" / "tiny" / ".incoming").iterdir()) == []


@contextmanager
def a_copy_ended_by(error: type[BaseException]) -> Iterator[None]:
    """Let the copy of an adapter's files end by ``error`` once the first one is there."""
    with pytest.MonkeyPatch.context() as patch:
        sync = os.fsync

        def stop(handle: int) -> None:
            sync(handle)
            raise error

        patch.setattr(os, "fsync", stop)
        yield


def test_an_empty_variable_is_not_given(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LORA_FS_ROOT=`` names no registry, and not the current folder."""
    monkeypatch.setenv("LORA_FS_ROOT", "")
    ran = lora_fs("list")
    assert ran.code == 2
    assert "LORA_FS_ROOT" in ran.err
