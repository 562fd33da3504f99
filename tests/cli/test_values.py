"""Durations and sizes as people write them."""

from __future__ import annotations

from collections.abc import Callable

import click
import pytest

from lora_fs.sidecar.cli.values import Count, Duration, Size
from tests.cli.conftest import LoraFs


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
