"""What changed between two states, whichever way it is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.view.snapshot import ByScope, changes

Key = tuple[Scope, str]
SCOPES = [Scope(namespace, "tiny") for namespace in ("a", "b", "c")]
VALUES = [[number] for number in range(3)]  # told apart by what they are, not by what they hold

keys = st.sampled_from([(scope, name) for scope in SCOPES for name in "wxyz"])
mappings = st.dictionaries(keys, st.sampled_from(VALUES), max_size=8)


def in_parts(mapping: dict[Key, list[int]], known: ByScope[Key, list[int]]) -> ByScope[Key, list[int]]:
    """By scope; a part that has what it had is the one it was."""
    parts = {
        scope: {key: value for key, value in mapping.items() if key[0] == scope}
        for scope in {key[0] for key in mapping}
    }
    same = {scope for scope, part in parts.items() if known.parts.get(scope) == part}
    return ByScope(lambda key: key[0], {s: known.parts[s] if s in same else parts[s] for s in parts})


@given(mappings, mappings, st.booleans())
def test_changes(before: dict[Key, list[int]], other: dict[Key, list[int]], grown: bool) -> None:
    """Every key that has another value than before, and every new one: in one piece or in parts."""
    after = {**before, **other} if grown else other
    expected = {key: value for key, value in after.items() if before.get(key) is not value}
    assert dict(changes(before, after)) == expected
    first = in_parts(before, ByScope(lambda key: key[0]))
    second = in_parts(after, first)
    assert dict(changes(first, second)) == expected
    assert dict(changes(first, after)) == expected
    assert list(changes(second, second)) == []
