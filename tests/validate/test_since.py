"""What an engine of which version serves as it was trained. An unknown version is never a fine one."""

from __future__ import annotations

import json

import pytest

from lora_fs.sidecar.validate import heeds_all, needs_newer, too_old, version_problem

OF_0_31 = (
    *("0.31.0", "0.31.0+cpu", "0.31.1.post2", "0.26.0", "0.9.2"),
    *("0.31.1.dev12+g1a2b3c", "0.32.0rc1", "0.1.dev1+g1a2b3c"),  # built before 0.32 was whole
)
NEWER = ("0.32.0", "0.32.0+cpu", "0.32.1rc1", "0.33.0", "1.0", "0.100.0")
NONE = (None, "", "dev", "0.32-of-a-fork", "zero", "0.32.0; rm", "\x00")


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"r": 8}, ()),
        ({"rank_pattern": {}, "alpha_pattern": None}, ()),
        ({"rank_pattern": {"q_proj": 4}}, ("rank_pattern",)),
        ({"alpha_pattern": {"q_proj": 4}, "rank_pattern": {"q_proj": 4}}, ("rank_pattern", "alpha_pattern")),
    ],
)
def test_what_not_every_engine_heeds(config: dict[str, object], fields: tuple[str, ...]) -> None:
    """A field that is set; an empty one changes nothing."""
    assert needs_newer(json.dumps(config).encode()) == fields


@pytest.mark.parametrize("said", OF_0_31)
def test_patterns_are_refused_on_an_older_engine(said: str) -> None:
    """Each field has a finding with the version, the reason and the cure."""
    first, second = too_old(("rank_pattern", "alpha_pattern"), said)
    assert (first.code, first.field, second.field) == ("engine-too-old", "rank_pattern", "alpha_pattern")
    assert f"vLLM {said}, ignores it" in first.message
    assert "vLLM 0.32 or newer" in first.hint
    assert version_problem(said) is None


@pytest.mark.parametrize("said", NEWER)
def test_patterns_are_served_by_a_newer_engine(said: str) -> None:
    """Since 0.32, whatever is built of it."""
    assert too_old(("rank_pattern", "alpha_pattern"), said) == ()


@pytest.mark.parametrize("said", NONE)
def test_patterns_are_refused_where_the_version_is_unknown(said: str | None) -> None:
    """What is no version is told as it came, and refused as an old one is."""
    problem = version_problem(said)
    assert problem is not None
    (found,) = too_old(("alpha_pattern",), said)
    assert (found.code, problem in found.message) == ("engine-too-old", True)
    assert "\x00" not in found.message


@pytest.mark.parametrize("said", [*NEWER, *OF_0_31, *NONE])
def test_which_engines_heed_every_field(said: str | None) -> None:
    """Those since 0.32 alone; an unknown version does not count as one."""
    assert heeds_all(said) == (said in NEWER)


def test_a_plain_adapter_asks_for_no_version() -> None:
    """Every engine serves it right, also one whose version is unknown."""
    assert too_old((), None) == too_old((), "0.1") == ()
