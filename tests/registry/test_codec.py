"""Sealed JSON: what is sealed comes back, and whatever else it is handed is CorruptRecord."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import CorruptRecord, InputError
from lora_fs.sidecar.model import MOST_PRIORITY, JsonObject, Policy, Record
from lora_fs.sidecar.registry.format.sealed import decode, seal, unseal
from lora_fs.sidecar.registry.store.marker import Marker

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=6)


def record(**more: Any) -> Record:
    return Record.model_validate(
        {
            **{"namespace": "default", "model": "tiny", "revision": "v1", "name": "a1", "generation": 1},
            **{"request_id": "r", "token": "t", "writer": "w", "updated_at": "now", "uid": "u"},
            **{"state": "present", "origin": "register"},
            "spec": {
                **{"source": {"uri": "file:///a"}, "path": "p", "base_model": "tiny", "size_bytes": 1},
                **{"digest": "sha256:" + "0" * 64, "files": [], "int_id": 1},
                "lora": {"rank": 4, "alpha": 8, "target_modules": ["q_proj"], "dtype": "float32"},
                **more.pop("spec", {}),
            },
            **more,
        }
    )


SEALED = seal(record())


def unsealed_or_corrupt(data: bytes) -> JsonObject | None:
    """What readers make of it: nothing but a value or CorruptRecord may come out."""
    try:
        return unseal(data)
    except CorruptRecord:
        return None


def without_sum(value: JsonObject) -> JsonObject:
    return {name: item for name, item in value.items() if name != "sum"}


def foreign(value: JsonObject) -> bytes:
    """Seal as another writer may, which bounds no depth."""
    body = without_sum(value)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return json.dumps({**body, "sum": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


@given(OBJECTS)
def test_what_is_sealed_comes_back(value: JsonObject) -> None:
    """Unseal gives what was sealed, and sealing that again gives the same bytes."""
    value = without_sum(value)
    data = seal(value)
    assert without_sum(unseal(data)) == value
    assert seal(unseal(data)) == data


def test_every_bit_of_a_record_is_guarded() -> None:
    """Each bit flipped in turn is corrupt, or changes only white space."""
    for place in range(len(SEALED)):
        for bit in range(8):
            mutated = bytearray(SEALED)
            mutated[place] ^= 1 << bit
            value = unsealed_or_corrupt(bytes(mutated))
            assert value is None or value == unseal(SEALED)


def test_every_truncation_is_corrupt() -> None:
    """A file cut at any length is not yet visible; only the last line's end may be missing."""
    for length in range(len(SEALED) - 1):
        assert unsealed_or_corrupt(SEALED[:length]) is None
    assert unseal(SEALED[:-1]) == unseal(SEALED)


@given(st.binary(max_size=200))
def test_bytes_are_corrupt(data: bytes) -> None:
    """No bytes raise anything else."""
    assert unsealed_or_corrupt(data) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"sum": "x", "a": ' + "[" * 900 + "]" * 900 + "}",
        '{"sum": "x", "a": ' + "9" * 5000 + "}",
        '{"sum": "x", "a": NaN}',
        '{"sum": "x", "a": -Infinity}',
        '{"sum": "x", "a": 1e999}',
        '{"sum": "x", "a": "\\ud800"}',
        '{"sum": "x", "\\udfff": 1}',
        '{"sum": "x", "sum": "y"}',
        '{"sum": 1}',
        '{"sum": null}',
        "[]",
        "null",
        "",
        "\ufeff{}",
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_what_is_no_sealed_object(text: str) -> None:
    """Deep nesting, huge numbers, NaN, lone surrogates and the like are CorruptRecord and nothing else."""
    for data in (text.encode(), text.encode("utf-16"), text.encode() + b"\xff"):
        with pytest.raises(CorruptRecord):
            unseal(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_json_is_never_sealed(value: float) -> None:
    """NaN and Infinity, which JSON does not have, are refused before they are written."""
    with pytest.raises(ValueError, match="JSON"):
        seal({"a": value})


@pytest.mark.parametrize("depth", [50, 200, 500, 900])
def test_deep_unknown_fields_never_raise_anything_else(depth: int) -> None:
    """A sealed record with a deep unknown field is read and written on, or is CorruptRecord."""
    deep: Any = []
    for _ in range(depth):
        deep = [deep]
    try:
        read = decode(Record, foreign(record().model_dump(mode="json") | {"deep": deep}))
    except CorruptRecord:
        return
    assert decode(Record, seal(read.model_dump(mode="json"))) == read


@pytest.mark.parametrize(("written", "read"), [(2**70, MOST_PRIORITY), (-(2**70), -MOST_PRIORITY), (7, 7)])
def test_a_priority_that_no_engine_takes_is_read_as_the_bound(written: int, read: int) -> None:
    """One call to an engine's workers has all priorities: a record that breaks it stops every adapter."""
    data = seal(record(spec={"policy": {"kind": "eager", "priority": 7}}))
    told = unseal(data)
    told["spec"]["policy"]["priority"] = written
    policy = decode(Record, foreign(without_sum(told))).spec.policy
    assert policy is not None
    assert policy.priority == read


def test_unknown_fields_survive() -> None:
    """Fields of a newer writer pass through a read and a write, at every level."""
    newer = record(shiny=[1, {"a": None}], spec={"colour": "red", "policy": {"kind": "lazy", "mood": 3}})
    again = decode(Record, seal(decode(Record, seal(newer))))
    dumped = again.model_dump(mode="json")
    assert dumped["shiny"] == [1, {"a": None}]
    assert dumped["spec"]["colour"] == "red"
    assert dumped["spec"]["policy"]["mood"] == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("apiVersion", "lora-fs/v2"),
        ("generation", 0),
        ("name", "../x"),
        ("state", "gone"),
        ("spec", {}),
        ("spec.path", "a\0b"),
    ],
)
def test_a_sealed_body_of_the_wrong_shape(field: str, value: object) -> None:
    """A seal that holds is not enough: the field that does not fit is named."""
    body = record().model_dump(mode="json")
    *outer, last = field.split(".")
    (body[outer[0]] if outer else body)[last] = value
    with pytest.raises(CorruptRecord, match=field):
        decode(Record, seal(body))


@given(OBJECTS)
def test_any_sealed_object_is_a_kind_or_corrupt(value: JsonObject) -> None:
    """Sealed objects of other shapes raise nothing but CorruptRecord."""
    for kind in (Record, Policy, Marker):
        try:
            decode(kind, seal(value))
        except CorruptRecord:
            continue


def test_cat_is_enough_to_read_it() -> None:
    """A sealed file is indented JSON that ends in a line's end."""
    assert SEALED.endswith(b"}\n")
    assert SEALED.count(b"\n") > 20
    assert json.loads(SEALED)["name"] == "a1"


@given(st.integers(0, len(SEALED)), st.integers(0, 40), st.binary(max_size=40))
def test_any_stretch_replaced_is_corrupt_or_means_the_same(place: int, length: int, put: bytes) -> None:
    """Bytes cut out, inserted or overwritten make no other value."""
    value = unsealed_or_corrupt(SEALED[:place] + put + SEALED[place + length :])
    assert value is None or value == unseal(SEALED)


def test_a_duplicate_key_cannot_smuggle_a_value() -> None:
    """Of two values under one key the one that is read is the one that is sealed."""
    for smuggled in (b'{"state": "deleted",', b'{"spec": {}, "state": "deleted",'):
        assert unseal(smuggled + SEALED[1:]) == unseal(SEALED)
        tail = SEALED.rstrip()[:-1] + b"," + smuggled[1:-1] + b"}"
        assert unsealed_or_corrupt(tail) is None


def test_a_lone_surrogate_is_never_sealed() -> None:
    """Text that UTF-8 cannot hold is the caller's fault, at any depth and in any key."""
    for value in ({"a": "\udcff"}, {"\ud800": 1}, {"a": [{"b": "x\udfff"}]}):
        with pytest.raises(InputError, match="UTF-8"):
            seal(value)


def test_a_newer_body_is_told_from_damage() -> None:
    """Its version is what is said of it, whatever else it has come to look like."""
    with pytest.raises(CorruptRecord, match=r"lora-fs/v2.*needs another lora-fs"):
        decode(Record, seal({"apiVersion": "lora-fs/v2", "shape": "another"}))
