"""What the harness forks says and does what the script does: other tests may take the one for the other."""

from __future__ import annotations

import signal

import pytest

from lora_fs.demo.volume import CommandHung, Ran, Volume
from tests.gateway import forks
from tests.gateway.forks import commands_are_forked
from tests.registry.conftest import write_adapter


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Volume:
    folder = tmp_path_factory.mktemp("volume")
    made = Volume(folder / "root", "tiny", cwd=folder)
    made.root.mkdir()
    made.run("init")
    write_adapter(folder / "source", 1)
    made.run("register", "one", "source", "--base-model", "tiny")
    return made


@pytest.mark.parametrize(
    "arguments",
    [
        ("list",),
        ("list", "-o", "json"),
        ("show", "one", "-o", "json"),
        ("show", "nobody"),
        ("register", "two", "no-such-folder"),
        ("list", "--no-such-option"),
        ("no-such-command",),
        ("promote", "one", "v9"),
        ("--help",),
        ("fsck",),
        (),
    ],
    ids=" ".join,
)
def test_a_fork_says_what_the_script_says(volume: Volume, arguments: tuple[str, ...]) -> None:
    """The same output, errors and exit code, of a path that the folder decides, too."""
    by_script = volume.try_run(*arguments)
    with commands_are_forked():
        assert volume.try_run(*arguments) == by_script


def test_a_fork_changes_the_volume(volume: Volume) -> None:
    """From its own folder, with its own environment, and again."""
    with commands_are_forked():
        for name in ("two", "three"):
            volume.run("register", name, "source", "--base-model", "tiny")
    assert {"one", "two", "three"} <= set(volume.run("list").stdout.split())


def test_a_command_that_hangs_is_ended(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says where the command was, as with the script."""
    monkeypatch.setattr(forks, "_COMMAND_LIMIT_S", 1)
    with commands_are_forked(), pytest.raises(CommandHung) as hung:
        volume.run("events", "--follow")
    ran: Ran = hung.value.ran
    assert ran.exit_code == -signal.SIGABRT
    assert "most recent call first" in ran.stderr
