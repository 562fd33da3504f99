"""``docs/cli.md`` against the real command tree: nothing is missing, nothing is made up."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from lora_fs.sidecar.cli.context import EXIT_CODES
from lora_fs.sidecar.cli.main import cli

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))


def test_every_command_has_its_section() -> None:
    """And no section tells of a command that is not there."""
    assert {name for name in SECTIONS if name.islower()} == set(cli.commands)


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_option_is_told(name: str) -> None:
    """The options a section's table lists are those the command takes."""
    listed = set(
        re.findall(r"`(--?[a-z][a-z-]*)`", "\n".join(re.findall(r"^\| (.*?) \|", SECTIONS[name], re.M)))
    )
    options = [option for option in cli.commands[name].params if isinstance(option, click.Option)]
    assert listed == {word for option in options for word in (*option.opts, *option.secondary_opts)}


def test_every_exit_code_is_told() -> None:
    """Each code that an error may become has its line."""
    told = {int(code) for code in re.findall(r"^\| ([0-9]+) \|", TEXT, re.MULTILINE)}
    assert told == {0, 2, 130, *(code for _, code in EXIT_CODES)}
