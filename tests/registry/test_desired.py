"""What changed between two states: as it was carried along, or by comparing them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.view.snapshot import TRAIL, TRAIL_KEYS, ByScope, Growing, touched

Key = tuple[Scope, str]
SCOPES = [Scope(namespace, "tiny") for namespace in ("a", "b", "c")]
VALUES = [[number] for number in range(3)]  # told apart by what they are, not by what they hold

keys = st.sampled_from([(scope, name) for scope in SCOPES for name in "wxyz"])
mappings = st.dictionaries(keys, st.sampled_from(VALUES), max_size=8)


def mapped() -> ByScope[Key, list[int]]:
    return ByScope(lambda key: key[0])


def grown(before: ByScope[Key, list[int]], more: dict[Key, list[int]]) -> ByScope[Key, list[int]]:
    growing = Growing(before)
    for key, value in more.items():
        growing.put(key, value)
    return growing.whole()


@given(st.lists(mappings, min_size=1, max_size=5), mappings)
def test_touched(steps: list[dict[Key, list[int]]], other: dict[Key, list[int]]) -> None:
    """Every key that has another value, came or went, of any two states, however they came about."""
    states = [mapped()]
    for more in steps:
        states.append(grown(states[-1], more))
    states.append(grown(mapped(), other))  # made from none of them, as after a restore
    for before in states:
        for after in [*states, dict(states[-2])]:
            found = touched(before, after)
            expected = {k for k in {*before, *after} if before.get(k) is not after.get(k)}
            assert len(found) == len(set(found))
            assert set(found) == expected


class Counting(ByScope[Key, list[int]]):
    """Tells whether somebody went through it."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Key]:
        raise AssertionError("the whole mapping was gone through")


def test_few_changes_are_found_without_the_rest() -> None:
    """Who knew a state of some changes ago looks at what these touched, and at nothing else."""
    first = Counting(lambda key: key[0], {scope: {(scope, "x"): VALUES[0]} for scope in SCOPES})
    last: ByScope[Key, list[int]] = first
    for number in range(TRAIL):
        last = grown(last, {(SCOPES[0], f"a{number}"): VALUES[1]})
    assert len(touched(first, last)) == TRAIL
    with pytest.raises(AssertionError, match="gone through"):  # longer ago
        touched(first, grown(last, {(SCOPES[1], "y"): VALUES[1]}))
    many = {(SCOPES[0], f"b{number}"): VALUES[1] for number in range(TRAIL_KEYS + 1)}
    with pytest.raises(AssertionError, match="gone through"):  # by too much at once
        touched(first, grown(first, many))
