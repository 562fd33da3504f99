"""The command as a shell runs it: help, completion, pipes, signals."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.main import cli
from tests.cli.conftest import LoraFs

LORA_FS = str(Path(sys.executable).with_name("lora-fs"))


def examples() -> Iterator[tuple[str, str]]:
    """Every ``lora-fs …`` line of every help page."""
    for name, command in [("", cli), *cli.commands.items()]:
        for line in re.findall(r"^ +(lora-fs .*)$", command.help or "", re.MULTILINE):
            yield name, line


def test_every_command_has_an_example() -> None:
    """Each help page shows how the command is used."""
    assert {name for name, _ in examples()} == {"", *cli.commands}


@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_the_example_parses(name: str, line: str) -> None:
    """Its command and its options exist, and take what it gives them."""
    words = shlex.split(line)[1:]
    at = next(index for index, word in enumerate(words) if word in cli.commands)
    assert name in ("", words[at])
    command = cli.commands[words[at]]
    assert command.make_context(words[at], words[at + 1 :]).params is not None
    assert set(words[:at:2]) <= {option for parameter in cli.params for option in parameter.opts}


def test_help_of_every_command(lora_fs: LoraFs) -> None:
    """Exit 0, and every option is explained."""
    for name, command in cli.commands.items():
        ran = lora_fs(name, "--help")
        assert ran.code == 0
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.opts[0] in ran.out
                assert option.help or isinstance(option.type, click.Choice), (name, option.name)


def test_an_unknown_command(lora_fs: LoraFs) -> None:
    """A usage error."""
    ran = lora_fs("regsiter")
    assert ran.code == 2
    assert "regsiter" in ran.err


def test_no_root(lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says how to give one."""
    monkeypatch.delenv("LORA_FS_ROOT")
    ran = lora_fs("list")
    assert ran.code == 2
    assert "LORA_FS_ROOT" in ran.err


def test_dynamos_variable(lora_fs: LoraFs, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DYNAMO_LORA_PATH names the root where LORA_FS_ROOT does not."""
    root.mkdir()
    monkeypatch.setenv("DYNAMO_LORA_PATH", str(root))
    monkeypatch.delenv("LORA_FS_ROOT")
    assert str(root) in lora_fs("list").err


def complete(words: str, incomplete: str) -> list[str]:
    """What bash would propose after ``words``."""
    environment = {
        **os.environ,
        "_LORA_FS_COMPLETE": "bash_complete",
        "COMP_WORDS": f"lora-fs {words} {incomplete}".rstrip(),
        "COMP_CWORD": str(len(words.split()) + 1),
    }
    ran = subprocess.run([LORA_FS], env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert not ran.stderr
    return [line.partition(",")[2] for line in ran.stdout.splitlines() if line]


def test_completion(lora_fs: LoraFs, folder: Callable[[int], str], root: Path) -> None:
    """Commands, names and revisions are proposed, and nothing where there is no registry."""
    lora_fs("register", "support", folder(1))
    lora_fs("register", "support", folder(2))
    lora_fs("register", "billing", folder(3))
    assert complete("", "pro") == ["promote"]
    assert complete("promote", "") == ["billing", "support"]
    assert complete("show", "su") == ["support"]
    assert complete("promote support", "") == ["v1", "v2"]
    root.rename(root.with_name("gone"))
    assert complete("show", "su") == []


def test_a_pipe_that_closes(root: Path, lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """``lora-fs list | head`` ends without a word on stderr."""
    lora_fs("register", "a", folder(1))
    read, write = os.pipe()
    os.close(read)
    ran = subprocess.run([LORA_FS, "list"], stdout=write, stderr=subprocess.PIPE, check=False, timeout=60)
    os.close(write)
    assert ran.stderr == b""


def test_ctrl_c(root: Path, lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """It ends what watches with 130 and one line."""
    lora_fs("register", "a", folder(1))
    with subprocess.Popen(
        [LORA_FS, "status", "--watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as watching:
        assert watching.stdout is not None
        while "ADAPTER" not in watching.stdout.readline():
            assert watching.poll() is None
        watching.send_signal(signal.SIGINT)
        _, stderr = watching.communicate(timeout=30)
    assert watching.returncode == 130
    assert stderr.strip() == "lora-fs: interrupted"
