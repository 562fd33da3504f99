"""Where bodies name their model."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.server.model_field import find_model

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
