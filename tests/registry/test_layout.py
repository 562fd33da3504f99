"""Names: each is taken apart in one way, and what is no name of ours is nobody's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.registry.format.layout import Generation, Listing, generation_name, parse_generation

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
GENERATIONS = st.integers(1, 10**18 - 1)
TOKENS = st.just("") | st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
ENTRIES = st.lists(
    st.builds(generation_name, st.sampled_from("a a1 a.b".split()), st.integers(1, 4), TOKENS)
    | st.sampled_from("a a1 .tmp-1 .hidden README.md a1.@0.json x@y".split()),
    unique=True,
    max_size=12,
)


@given(NAMES, GENERATIONS, TOKENS)
def test_names_round_trip(name: str, generation: int, token: str) -> None:
    """What is written is read back."""
    assert parse_generation(generation_name(name, generation, token)) == (
        name,
        Generation(generation, token),
    )


@given(NAMES, GENERATIONS, st.text("0", max_size=4))
def test_one_spelling_a_generation(name: str, generation: int, zeros: str) -> None:
    """A file that spells a generation otherwise is not a second body of it."""
    spelled = f"{name}.@{zeros}{generation}.json"
    assert parse_generation(spelled) is None or spelled == generation_name(name, generation)


@pytest.mark.parametrize(
    "name",
    [
        "a.@00000000.json",
        "a.@1.json",
        "a.@" + "9" * 19 + ".json",
        "a.@0000000١.json",
        ".@00000001.json",
        "../a.@00000001.json",
        "a.@00000001.json.tmp",
        "a.@00000001\n.json",
        "a.@00000001.json\n",
    ],
)
def test_what_is_no_generation(name: str) -> None:
    """Generation 0, other digits, line ends and paths are not."""
    assert parse_generation(name) is None


@given(ENTRIES, ENTRIES)
def test_a_listing_built_on_the_last_is_the_same(before: list[str], after: list[str]) -> None:
    """However the names changed, what is learned from the change is what a fresh look learns."""
    grown, fresh = Listing.of(after, Listing.of(before)), Listing.of(after)
    assert (grown.packed, grown.records) == (fresh.packed, fresh.records)
    assert (set(grown.folders), grown.siblings) == (set(fresh.folders), fresh.siblings)
