"""What a request asks for: a small body is read another way than a long one, and says the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.server.proxy.json_fields import SMALL_BYTES
from lora_fs.worker_patch.api import asks
from tests.server.at_once import at_once

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=100),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(("model", "user", "background", "prompt", "n")), VALUES, max_size=5)


def read(body: bytes, content_type: str = "application/json", path: str = "/v1/completions") -> asks.Asks:
    headers = [(b"content-type", content_type.encode())]
    return at_once(asks.read({"type": "http", "path": path, "headers": headers}, body))


@given(body=BODIES, ascii_only=st.booleans(), encoding=st.sampled_from(("utf-8", "utf-8-sig", "utf-16")))
def test_a_small_body_says_what_it_would_say_as_a_long_one(
    body: dict[str, Any], ascii_only: bool, encoding: str
) -> None:
    """Blanks alone make it long."""
    small = json.dumps(body, ensure_ascii=ascii_only).encode(encoding, "surrogatepass")
    long = small + (" " * SMALL_BYTES).encode("utf-16-le" if encoding == "utf-16" else "utf-8")
    one, other = read(small), read(long)
    assert (one.model, one.user, one.is_fetched_later) == (other.model, other.user, other.is_fetched_later)


def test_the_last_of_two_fields_counts() -> None:
    """As for vLLM's parser."""
    assert read(b'{"model": "a", "model": "b"}').model == "b"


@pytest.mark.parametrize("content_type", ["multipart/form-data; boundary=x", "MULTIPART/form-data"])
def test_a_form_is_no_json(content_type: str) -> None:
    """Whatever its bytes look like."""
    assert read(b'{"model": "sql"}', content_type).model is None
