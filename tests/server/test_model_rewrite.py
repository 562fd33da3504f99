"""Where bodies name their model."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.server.proxy.model_rewrite import (
    MAX_NAME_BYTES,
    MAX_UTF16_BYTES,
    Fields,
    ModelField,
)
from tests.server.at_once import find_fields, find_model

JSON = "application/json"


def form(fields: dict[str, str], audio: bytes) -> tuple[str, bytes]:
    """A multipart body as httpx builds it; returns its content type and its bytes."""
    files = {"file": ("speech.wav", audio, "audio/wav")}
    request = httpx.Request("POST", "http://engine/v1/audio/transcriptions", data=fields, files=files)
    return request.headers["content-type"], request.read()


@given(st.text(), st.dictionaries(st.text(), st.integers()))
def test_json(model: str, others: dict[str, int]) -> None:
    """Any JSON object's model is found, and renaming it leaves the rest as it was."""
    body = {**others, "model": model}
    field = find_model(JSON, json.dumps(body).encode())
    assert field is not None
    assert field.name == model
    assert json.loads(field.renamed("other")) == {**body, "model": "other"}


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b'{"model": 3}', b'{"prompt": "x"}', b"\xff\xfe", b"{" * 9999]
)
def test_json_that_names_none(body: bytes) -> None:
    """What cannot be parsed, or names no model, is passed on as it is."""
    assert find_model(JSON, body) is None


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["model", "user", "background", "prompt"]),
            st.none() | st.booleans() | st.text() | st.floats() | st.lists(st.text(), max_size=2),
        )
    ),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32-be"]),
    st.booleans(),
)
def test_json_is_read_as_the_engine_reads_it(
    fields: list[tuple[str, object]], encoding: str, plain: bool
) -> None:
    """Fields given twice, NaN, escaped or in another encoding: what Python's parser says stands there."""
    items = (f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=plain)}" for name, value in fields)
    body = ("{" + ", ".join(items) + "}").encode(encoding, "surrogatepass")
    meant = json.loads(body)
    field = find_fields(JSON, body)
    assert field.user == (meant.get("user") if isinstance(meant.get("user"), str) else None)
    assert (field.background is True) == (meant.get("background") is True)
    assert (field.background is None) == (meant.get("background") is None)
    if not isinstance(meant.get("model"), str):
        assert not isinstance(field, ModelField)
        assert find_model(JSON, body) is None
        return
    assert isinstance(field, ModelField)
    assert field.name == meant["model"]
    renamed = json.loads(field.renamed("other"))
    assert json.dumps(renamed) == json.dumps({**meant, "model": "other"})


def test_nothing_but_the_name_is_changed() -> None:
    """Numbers keep their digits, and what nests its own names."""
    body = b'{"a":1.50,"tools":[{"model":"b"}],"model" : "a1" ,"z":{"model":"c"}}'
    field = find_model(JSON, body)
    assert field is not None
    assert field.renamed("a1@v2") == body.replace(b'"a1"', b'"a1@v2"')


@pytest.mark.parametrize("kind", ["json", "form"])
def test_a_long_body_is_not_copied_to_rename_it(kind: str) -> None:
    """What is around the name is a view of the body: a copy of 60 MiB held the loop for 90 to 150 ms."""
    if kind == "json":
        content_type, body = (
            JSON,
            b'{"x":"' + b"x" * 100_000 + b'","model":"a1","y":"' + b"y" * 100_000 + b'"}',
        )
    else:
        content_type, body = form({"model": "a1"}, b"x" * 100_000)
    field = find_model(content_type, body)
    assert field is not None
    before, _, after = field.parts("other")
    for part in (before, after):
        assert isinstance(part, memoryview)
        assert part.obj is body
    assert field.renamed("a1") == body


def test_long_json_that_is_not_plain() -> None:
    """NaN and a byte order mark are read as in a short body. In UTF-16 it is refused, not passed on."""
    long = "x" * MAX_UTF16_BYTES
    body = json.dumps({"model": "a1", "x": [long, float("nan")]}).encode()
    for read in (body, b"\xef\xbb\xbf" + body):
        field = find_model(JSON, read)
        assert field is not None
        assert field.renamed("a1") == read
    with pytest.raises(InputError, match="UTF-8"):
        find_model(JSON, json.dumps({"model": "a1", "x": long}).encode("utf-16"))
    assert find_model(JSON, (long + '{"model": "a1"}').encode("utf-16")) is None
    assert find_model(JSON, json.dumps({"model": "a1", "x": long}).encode()[:-1]) is None


def test_json_whose_model_is_too_long() -> None:
    """It is refused, not passed on: blanks around it may hide a name. A user's name is none then."""
    blanks = b" " * MAX_NAME_BYTES
    for body in (b'{"model":%b"a1"}' % blanks, b'{"model":["%b"]}' % blanks):
        with pytest.raises(InputError, match="field model"):
            find_model(JSON, body)
    assert find_fields(JSON, b'{"user":"%b"}' % blanks) == Fields()


@given(st.binary(), st.sampled_from(["a0", "tenant/a0", "a0@v2"]))
def test_form(audio: bytes, model: str) -> None:
    """A form's model is found beside a file of any bytes, and renamed alone."""
    content_type, body = form({"model": model, "language": "en"}, audio)
    field = find_model(content_type, body)
    assert field is not None
    assert field.name == model
    renamed = field.renamed("a0@v9")
    found = find_model(content_type, renamed)
    assert found is not None
    assert found.name == "a0@v9"
    assert found.renamed(model) == body
    assert audio in renamed


def test_form_without_a_model() -> None:
    """A file that says so in its content does not name the model."""
    content_type, body = form({"language": "en"}, b'name="model"\r\n\r\na0\r\n--')
    assert find_model(content_type, body) is None


def test_form_without_a_boundary() -> None:
    """It cannot be taken apart, and is the engine's to refuse."""
    assert find_model("multipart/form-data", b"--x\r\n") is None


def test_form_with_a_preamble() -> None:
    """What stands before the first boundary belongs to no field."""
    kind, body = form({"model": "a1"}, b"")
    field = find_model(kind, b"for readers of old\r\n" + body)
    assert field is not None
    assert field.name == "a1"


def test_form_whose_model_is_no_text() -> None:
    """It is a name that nobody has, and no error; the bytes around it stay as they are."""
    kind, body = form({"model": "a1"}, b"audio")
    field = find_model(kind, body.replace(b"\r\na1\r\n", b"\r\na\xff\r\n"))  # "a1" may be in the boundary
    assert field is not None
    assert field.name == "a\N{REPLACEMENT CHARACTER}"
    assert field.renamed("a1") == body


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("model", [{"model": "a1"}, {}, {"model": None}], ids=["a model", "none", "null"])
@pytest.mark.parametrize(("user", "seen"), [("ann", "ann"), (7, None), (None, None)])
def test_the_user(user: object, seen: str | None, model: dict[str, object], encoding: str) -> None:
    """A body says whose request it is, where that is a name, with a model and without one."""
    body = json.dumps({**model, "user": user, "background": True}).encode(encoding)
    said = find_fields(JSON, body)
    assert (said.user, said.background) == (seen, True)
    field = find_model(JSON, body)
    assert (field and field.name) == model.get("model")


@pytest.mark.parametrize("body", [b"[]", b"{", b"", "[]".encode("utf-16"), b'{"x": NaN'])
def test_what_says_nothing(body: bytes) -> None:
    """No object, or none that can be read, has no user."""
    assert find_fields(JSON, body) == Fields()


def test_json_that_nests_deeply() -> None:
    """It is read, however deep: the engine's Python may go as deep, and find a model there."""
    for depth in (3_000, 99_999):
        deep = b"[" * depth + b"]" * depth
        for body in (
            b'{"x": ' + deep + b', "model": "a1"}',
            b'{"model": "a1", "x": NaN, "y": ' + deep + b"}",
        ):
            field = find_model(JSON, body)
            assert field is not None
            assert field.renamed("a2") == body.replace(b'"a1"', b'"a2"')
