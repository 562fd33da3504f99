"""``docs/cli.md`` against the real command tree, and every command line that any page shows."""

from __future__ import annotations

import re
import shlex
from itertools import takewhile
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.exit_codes import DIFFERS, EXIT_CODES
from lora_fs.sidecar.cli.main import cli
from lora_fs.sidecar.cli.options.command import Command
from lora_fs.sidecar.settings import Settings
from tests.cli.conftest import parse
from tests.docs.blocks import blocks, commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = (ROOT / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))

OPERATORS = {"|", "||", "&&", ";", "&", ">"}


def listed(text: str) -> set[str]:
    """The options in the first column of a text's tables."""
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    return set(re.findall(r"`(--?[A-Za-z][a-z-]*)(?: [A-Z]+)?`", "\n".join(cells)))


def taken(command: click.Command) -> set[str]:
    """The options a command takes besides those of the registry, which every command takes."""
    own = command.own if isinstance(command, Command) else command.params
    options = [parameter for parameter in own if isinstance(parameter, click.Option)]
    return {word for option in options for word in (*option.opts, *option.secondary_opts)}


def test_every_command_has_its_section() -> None:
    """And no section tells of a command that is not there."""
    assert {name for name in SECTIONS if name.islower()} == set(cli.commands)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_is_told(name: str) -> None:
    """The options a section's table lists are those the command takes."""
    assert listed(SECTIONS[name]) == taken(cli.commands[name])


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_the_arguments_are_told(name: str) -> None:
    """A section opens with the command and its arguments in their order."""
    taken = [one for one in cli.commands[name].params if isinstance(one, click.Argument)]
    arguments = [(one.metavar or str(one.name)).strip("[]").upper() for one in taken]
    assert SECTIONS[name].strip().splitlines()[0] == f"`{' '.join(['lora-fs', name, *arguments])}`"


def test_the_groups_options_are_told() -> None:
    """The options before the command are in the first table."""
    assert listed(TEXT.partition("## ")[0]) == taken(cli) | {"-h", "--help"}


def test_every_exit_code_is_told() -> None:
    """Each code that an error may become has its line."""
    told = {int(code) for code in re.findall(r"^\| ([0-9]+) \|", TEXT, re.MULTILINE)}
    assert told == {0, 2, DIFFERS, 130, *(code for _, code in EXIT_CODES)}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_is_told(shell: str) -> None:
    """How each shell gets its completion is in the last table."""
    assert f"_LORA_FS_COMPLETE={shell}_source" in SECTIONS["Completion"]


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_examples_are_those_of_the_help(name: str) -> None:
    """The examples of a section are those that ``--help`` shows."""
    shown = re.findall(r"^\$ (lora-fs .*)$", SECTIONS[name], re.MULTILINE)
    assert shown == re.findall(r"^ +(lora-fs .*)$", cli.commands[name].help or "", re.MULTILINE)


def command_lines(page: Path, text: str | None = None) -> list[list[str]]:
    """The words after ``lora-fs`` of every command in a page's console blocks."""
    found = []
    for block in blocks(page, text):
        for command in commands(block) if block.language == "console" else ():
            words = list(takewhile(lambda word: word not in OPERATORS, shlex.split(command.text)))
            starts = [0, *(at + 1 for at, word in enumerate(words) if word == "--" or "=" in word)]
            found += [words[at + 1 :] for at in starts if words[at : at + 1] == ["lora-fs"]]
    return found


def test_command_lines_are_found() -> None:
    """Behind another command or a variable, before a pipe, over two lines; what is printed is not one."""
    text = "```console\n$ kubectl exec p -c lora-fs -- lora-fs status | head\nlora-fs no\n"
    text += "$ kubectl cp a p:/a -c lora-fs\n$ A=b lora-fs list\n"
    text += "$ lora-fs gc \\\n  --dry-run  # look first\n```\n"
    assert command_lines(Path("page.md"), text) == [["status"], ["list"], ["gc", "--dry-run"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_command_lines_parse(page: Path) -> None:
    """Every command line that a page shows is taken by the real command."""
    for words in command_lines(page):
        if words != ["--version"]:  # the one that is no command's
            parse(words)


def test_a_gateways_address_has_the_port_that_it_listens_on() -> None:
    """In docs, examples and help texts: the port of `lora-fs gateway` without `--port`."""
    files = [path for one in ("docs", "examples", "sidecar") for path in (ROOT / one).rglob("*.*")]
    texts = [path.read_text() for path in files if path.suffix in {".md", ".py", ".sh", ".yaml", ".yml"}]
    shown = re.findall(r"http://[a-z-]*gateway:([0-9]+)", "\n".join(texts))
    assert len(shown) > 5
    assert {int(port) for port in shown} == {Settings.model_fields["port"].default}
