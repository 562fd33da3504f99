"""Where an object's own fields stand: what Python's parser says, wherever a slice ends, in short turns."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.server.proxy import json_fields
from lora_fs.sidecar.server.proxy.json_fields import BLANKS, MAX_FIELDS, SLICE_BYTES, find_own_fields
from lora_fs.sidecar.server.proxy.model_rewrite import ModelField, find_fields, hides_its_model
from tests.server.at_once import at_once, in_turns

NAMES = ("model", "user")
TEXT = st.text(st.sampled_from('{}[]",:\\ amodel\u00e9\n')) | st.sampled_from(["model", '\\"', "\\\\"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES) | TEXT, inner, max_size=3)
    ),
    max_leaves=8,
)
ITEMS = st.lists(st.tuples(st.sampled_from(NAMES) | TEXT, VALUES), max_size=6)
MIB = 1 << 20
LONG_BYTES = 60 * MIB
MOST_S = 0.010


def values(body: bytes) -> dict[str, object] | None:
    """What stands where the fields are found."""
    found = at_once(find_own_fields(body, NAMES))
    return (
        None
        if found is None
        else {name: json.loads(body[span.start : span.end]) for name, span in found.items()}
    )


@given(
    ITEMS,
    st.integers(1, 9) | st.just(SLICE_BYTES),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.sampled_from(["", " \n"]),
    st.floats(0, 1),
)
def test_fields_are_those_of_pythons_parser(
    items: list[tuple[str, object]],
    slice_bytes: int,
    indent: int | None,
    plain: bool,
    blanks: str,
    part: float,
) -> None:
    """Whatever nests, repeats, is escaped, is cut by the end of a slice or fits into one.

    A part of an object has none.
    """
    text = ",".join(
        f"{json.dumps(name, ensure_ascii=plain)}:{json.dumps(value, ensure_ascii=plain, indent=indent)}"
        for name, value in items
    )
    body = (blanks + "{" + text + "}" + blanks).encode()
    meant = {name: value for name, value in json.loads(body).items() if name in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_fields, "SLICE_BYTES", slice_bytes)
        assert json.dumps(values(body), sort_keys=True) == json.dumps(meant, sort_keys=True)
        assert values(body[: int(part * body.rindex(b"}"))]) is None
        assert values(body + b"}") is None


@pytest.mark.parametrize("escapes", range(7))
@pytest.mark.parametrize("slice_bytes", [*range(1, 9), SLICE_BYTES])
def test_a_run_of_backslashes_over_slices(
    escapes: int, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An odd run escapes the quote behind it, an even one does not, wherever a slice ends."""
    monkeypatch.setattr(json_fields, "SLICE_BYTES", slice_bytes)
    said = "\\" * escapes + '"' + "\\" * escapes
    assert values(json.dumps({"x": said, "model": said}).encode()) == {"model": said}


def test_the_last_of_a_repeated_field_counts() -> None:
    """Python's parser takes the last, however its name is escaped."""
    assert values(b'{"model":"a","mod\\u0065l":"b"}') == {"model": "b"}
    assert values(b'{"model":"a","x":{"model":"c"},"y":"\\",\\"model\\":\\"d"}') == {"model": "a"}


@pytest.mark.parametrize(
    "body", [b"", b" ", b"[]", b'"{}"', b"x{}", b"{}x", b'{"model":"a"', b'[{"model":"a"}]']
)
def test_what_is_no_object(body: bytes) -> None:
    """Or is cut, or has something around it: the engine's parser refuses it, or finds no field."""
    assert values(body) is None


def test_an_object_of_many_fields() -> None:
    """Each is looked at by itself, so there are at most MAX_FIELDS of them."""
    fields = [f'"{number}":0' for number in range(MAX_FIELDS - 1)]
    assert values(("{" + ",".join([*fields, '"model":1']) + "}").encode()) == {"model": 1}
    with pytest.raises(InputError, match=str(MAX_FIELDS)):
        values(("{" + ",".join([*fields, '"model":1', '"x":1']) + "}").encode())


def filled(before: bytes, piece: bytes, after: bytes) -> bytes:
    return before + piece * ((LONG_BYTES - len(before) - len(after)) // len(piece)) + after


HALF = LONG_BYTES // 2
LONG: dict[str, Callable[[], bytes]] = {
    "one string": lambda: filled(b'{"x":"', b"QUJD", b'","model":"a1"}'),
    "a string of escapes": lambda: filled(b'{"x":"', rb"\\\"", b'","model":"a1"}'),
    "small strings": lambda: filled(b'{"x":[', b'"",', b'""],"model":"a1"}'),
    "small objects": lambda: filled(b'{"x":[', b'{"model":[]},', b'0],"model":"a1"}'),
    "deep nesting": lambda: b'{"x":' + b"[" * HALF + b"]" * HALF + b',"model":"a1"}',
    "numbers": lambda: filled(b'{"x":[', b"0,", b'0],"model":"a1"}'),
    "long numbers": lambda: filled(b'{"x":[', b"-0.12345678901234567, ", b'0],"model":"a1"}'),
    "blanks": lambda: filled(b"{", BLANKS, b'"model":"a1"}'),
    "blanks at the beginning": lambda: filled(b"", BLANKS, b'{"model":"a1"}'),
    "blanks behind a name": lambda: filled(b'{"model"', BLANKS, b':"a1"}'),
}


@pytest.mark.parametrize("shape", LONG)
def test_a_long_body_leaves_the_loop_to_others(shape: str) -> None:
    """No turn of 60 MiB takes more than 10 ms of CPU; msgspec took 16 to 113 ms at once."""
    body = LONG[shape]()
    found, longest_s, turns = in_turns(lambda: find_fields("application/json", body))
    assert isinstance(found, ModelField)
    assert found.name == "a1"
    assert longest_s <= MOST_S
    assert turns > LONG_BYTES // json_fields.SLICE_BYTES - 2


@pytest.mark.parametrize("piece", [b"\0", b"\r\n--", b"Content-Disposition: ", b"\r\n\r\n"])
def test_a_long_form_leaves_the_loop_to_others(piece: bytes) -> None:
    """Nor does any turn of a form, whatever its file is."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    tail = b'\r\n--b\r\nContent-Disposition: form-data; name="model"\r\n\r\na1\r\n--b--\r\n'
    kind, body = "multipart/form-data; boundary=b", filled(head, piece, tail)
    found, longest_s, turns = in_turns(lambda: find_fields(kind, body))
    assert isinstance(found, ModelField)
    assert found.name == "a1"
    hidden, also_s, more = in_turns(lambda: hides_its_model(kind, body))
    assert hidden is (piece == b"Content-Disposition: ")
    assert max(longest_s, also_s) <= MOST_S
    assert turns > 2
    assert more > 2 or hidden
