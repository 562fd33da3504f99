"""Durations and sizes as people write them."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from lora_fs.sidecar.cli.main import cli
from lora_fs.sidecar.cli.options.command import OPTIONS, Command, Setting
from lora_fs.sidecar.cli.options.values import Count, Duration, Size
from lora_fs.sidecar.settings import Settings, variables
from tests.cli.conftest import LoraFs


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_an_option_of_every_command_is_its_setting(option: Setting) -> None:
    """Its variables, help and default are those of the setting, which a page of help does not import."""
    assert option.name is not None
    field = Settings.model_fields[option.name]
    assert option.envvar == variables(option.name)
    assert option.help == field.description
    assert option.shown_default == (field.default or "")


def test_help_has_one_word_for_durations() -> None:
    """And one for sizes, in every command: an option that is made from a setting says the same."""
    shown = {
        (option.type.name, option.make_metavar(click.Context(command)))
        for command in map(cli.commands.__getitem__, sorted(cli.commands))
        for option in command.params
        if isinstance(option.type, Duration | Size)
    }
    assert shown == {("time", "TIME"), ("size", "SIZE")}


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("48h", 172_800), ("2d", 172_800), ("0.5", 0.5), ("500ms", 0.5)],
)
def test_durations(written: str, seconds: float) -> None:
    """A bare number is seconds."""
    assert Duration().convert(written, None, None) == seconds


@pytest.mark.parametrize("written", ["", "nan", "inf", "-1", "1w", "1 h", "h", "1e3"])
def test_what_is_no_duration(written: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(click.BadParameter, match="48h"):
        Duration().convert(written, None, None)


@pytest.mark.parametrize("written", ["0", "0s", "500ms"])
def test_a_duration_of_whole_seconds(written: str) -> None:
    """Less than a second is refused where the record holds whole seconds."""
    with pytest.raises(click.BadParameter, match="too short"):
        Duration(whole=True).convert(written, None, None)


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1000", 1000),
        ("7B", 7),
        ("5kB", 5000),
        ("500M", 500_000_000),
        ("5GB", 5 * 10**9),
        ("50Gi", 50 << 30),
        ("50GiB", 50 << 30),
        ("1Ti", 1 << 40),
    ],
)
def test_sizes(written: str, size: int) -> None:
    """A bare number is bytes."""
    assert Size().convert(written, None, None) == size


@pytest.mark.parametrize("written", ["", "none", "5X", "-5", "5 GB", "Gi", "1.5Gi"])
def test_what_is_no_size(written: str) -> None:
    """The message shows how one is written."""
    with pytest.raises(click.BadParameter, match="50Gi"):
        Size().convert(written, None, None)


def test_no_limit() -> None:
    """``none`` is a value where a limit can be lifted."""
    assert Size(or_none=True).convert("none", None, None) == "none"
    assert Count().convert("none", None, None) == "none"


@pytest.mark.parametrize("command", ["gc", "fsck"])
def test_a_number_that_was_hours_needs_its_unit(lora_fs: LoraFs, command: str) -> None:
    """48 was hours; as seconds it would remove what was to be kept."""
    ran = lora_fs(command, "--older-than", "48")
    assert (ran.code, "48h for hours" in ran.err) == (2, True)
    assert lora_fs(command, "--older-than", "48h").code == 0


def test_every_command_reads_them_alike(lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """A policy's idle time, a quota's bytes and a wait's bound take units."""
    assert lora_fs("register", "a", folder(1), "--ttl", "48h").code == 0
    assert lora_fs("show", "a", "-o", "json").json["revisions"][0]["spec"]["policy"]["ttl_s"] == 172_800
    assert lora_fs("quota", "--bytes", "5GB", "-o", "json").json["quota"]["size_bytes"] == 5 * 10**9
    assert lora_fs("wait", "a", "--timeout", "1ms").code == 6


def above_settings() -> list[Setting]:
    """Every option of a command that stands above a setting."""
    options = [option for name in cli.commands for option in cli.commands[name].params]
    return [option for option in (*cli.params, *options) if isinstance(option, Setting)]


def test_an_option_shows_the_variables_that_the_settings_read() -> None:
    """Their order is that of the settings: the first that is set counts."""
    for option in above_settings():
        shown = option.get_help_extra(click.Context(cli))["envvars"]
        assert list(shown) == variables(str(option.name)), option.name


def test_the_sidecars_options_are_made_from_the_settings(lora_fs: LoraFs) -> None:
    """Each tells what the field means, and the default that counts where neither it nor a variable is set."""
    shown = " ".join(lora_fs("sidecar", "--help").out.split())
    sidecar = cli.commands["sidecar"]
    assert isinstance(sidecar, Command)
    own = [option for option in sidecar.own if option.name != "create"]
    assert len(own) >= 18
    for option in own:
        field = Settings.model_fields[str(option.name)]
        assert isinstance(option, Setting)
        assert option.help == field.description
    for told in ("LORA_FS_PORT; default: 8001", "default: 8Gi", "default: 1h", "default: /stage"):
        assert told in shown
    assert "replica's status file; by default the host's name [env var: LORA_FS_REPLICA_ID]" in shown


@pytest.mark.parametrize(
    "server", ["http://ci:pa55@word@h", "htp://ci:pa55word@h", "http://ci:pa55word@[::1"]
)
def test_no_message_repeats_a_password(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is refused is shown without what stands before the @."""
    monkeypatch.setenv("LORA_FS_SERVER", server)
    said = CliRunner().invoke(cli, ["list"])
    assert said.exit_code == 2
    assert "LORA_FS_SERVER=" in said.output
    assert "://***@" in said.output
    assert "pa55" not in said.output
    assert "word" not in said.output


@pytest.mark.parametrize("line", ["--server 127.0.0.1:1 list", "list --server 127.0.0.1:1"])
def test_a_refused_option_is_named_by_its_own_word(
    lora_fs: LoraFs, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Who typed an option set no variable. A variable that is set is named, also beside an option."""
    monkeypatch.delenv("LORA_FS_ROOT")
    ran = lora_fs(*line.split())
    why = "write the sidecar's address as http://HOST:PORT or https://HOST"
    assert (ran.code, f"Error: --server 127.0.0.1:1: {why}\n" in ran.err) == (2, True), ran.err
    empty = lora_fs("list", "--server", "")  # as of "$SERVER" that nobody set
    assert (empty.code, f"Error: --server : {why}\n" in empty.err) == (2, True), empty.err
    monkeypatch.setenv("LORA_FS_SERVER", "127.0.0.1:2")
    assert f"Error: LORA_FS_SERVER=127.0.0.1:2: {why}\n" in lora_fs("list", "-n", "team-a").err
    assert "Error: --server 127.0.0.1:1: " in lora_fs(*line.split()).err
    monkeypatch.delenv("LORA_FS_SERVER")
    assert "Error: --port 99999: " in lora_fs("sidecar", "--port", "99999").err
