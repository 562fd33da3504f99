"""Which adapters a pattern and a label selector mean."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from tests.reconcile.test_plan import RECORD

texts = st.text("abc.-_/", min_size=1, max_size=4)


def labelled(labels: dict[str, str]) -> Record:
    return RECORD.model_copy(update={"spec": RECORD.spec.model_copy(update={"labels": labels})})


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("team=sql", {"sql"}),
        ("team==sql", {"sql"}),
        ("team!=sql", {"law", "none"}),
        ("team", {"sql", "law"}),
        ("!team", {"none"}),
        ("team, tier=gold", {"law"}),
        ("team=law,tier!=gold", set()),
        ("tier=", set()),
        (None, {"sql", "law", "none"}),
    ],
)
def test_selectors(selector: str | None, meant: set[str]) -> None:
    """As ``kubectl -l``: all have to hold, and ``!=`` is met without the label."""
    adapters = {
        "sql": labelled({"team": "sql"}),
        "law": labelled({"team": "law", "tier": "gold"}),
        "none": labelled({}),
    }
    selection = Selection.parse(None, selector)
    assert {name for name, record in adapters.items() if selection.covers(name, record)} == meant


@given(st.dictionaries(texts, texts), texts, texts)
def test_a_requirement_and_its_opposite(labels: dict[str, str], key: str, value: str) -> None:
    """Every adapter meets exactly one of the two."""
    record = labelled(labels)
    for one, other in ((f"{key}={value}", f"{key}!={value}"), (key, f"!{key}")):
        met = [Selection.parse(None, text).covers("a", record) for text in (one, other)]
        assert sorted(met) == [False, True]


def test_patterns_that_were_asked_once_take_no_memory() -> None:
    """Whoever may list may ask for any: the standard library's cache keeps 32,768 of them."""
    before = fnmatch._compile_pattern.cache_info()  # type: ignore[attr-defined]
    meant = [one for one in ("a*", "?c", "[!b]bc") if Selection.parse(one, None).covers("abc", RECORD)]
    assert meant == ["a*", "[!b]bc"]
    assert fnmatch._compile_pattern.cache_info() == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("selector", ["=x", "a=b=c", "a,,b", "!a=b", "a in (b)=", ",", "x" * 2_000])
def test_what_is_no_selector(selector: str) -> None:
    """It is told; it is not read as one that means everything."""
    with pytest.raises(InputError, match=r"label selector"):
        Selection.parse(None, selector)


def test_patterns_are_of_the_whole_name() -> None:
    """Case counts; a pattern that would be slow to refuse is refused at once."""
    assert Selection.parse("b*", None).covers("b1", RECORD)
    assert not Selection.parse("b", None).covers("b1", RECORD)
    assert not Selection.parse("B*", None).covers("b1", RECORD)
    assert not Selection.parse("*a" * 500 + "b", None).covers("a" * 128, RECORD)
