"""An answer that the engine aborts, as a vLLM does that gets SIGTERM."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.aborted import KEPT_BYTES, Unaborted
from lora_fs.sidecar.server.proxy.canary import Stored
from tests.server.conftest import FakeReplica, serving

ANY_MODEL = pytest.mark.parametrize("model", ["a1", "tiny"])


def answered(text: str, why: str) -> dict[str, Any]:
    """A completion, as vLLM's."""
    choice = {"index": 0, "text": text, "finish_reason": why}
    return {"id": "1", "object": "text_completion", "created": 1, "model": "a1", "choices": [choice]}


def packed(value: object) -> bytes:
    """As vLLM writes JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


class Stopping:
    """Aborts what it is asked, after so much text; ``breaks`` ends the connection in the middle."""

    def __init__(self) -> None:
        self.text, self.why, self.breaks = "cut o", "abort", False
        self.fails: str | None = None
        self.app = Starlette(routes=[Route("/v1/completions", self.complete, methods=["POST"])])

    async def complete(self, request: Request) -> Response:
        if (await request.json()).get("stream"):
            return StreamingResponse(self.events(), media_type="text/event-stream")
        if self.fails is not None:
            error = {"message": self.fails, "type": "InternalServerError", "param": None, "code": 500}
            return JSONResponse({"error": error}, 500)
        if self.breaks:
            return StreamingResponse(self.broken(), media_type="application/json")
        return JSONResponse(answered(self.text, self.why))

    async def events(self) -> AsyncIterator[bytes]:
        yield (
            b"data: "
            + packed({**answered(self.text, ""), "choices": [{"index": 0, "text": "one"}]})
            + b"\n\n"
        )
        last = b"data: " + packed(answered("", self.why)) + b"\n\n"
        yield last[:-30]
        await asyncio.sleep(0.05)
        yield last[-30:]
        yield b"data: [DONE]\n\n"

    async def broken(self) -> AsyncIterator[bytes]:
        yield b'{"id":"1",'
        await asyncio.sleep(0.05)
        raise ConnectionError


@pytest.fixture
def stopping() -> Stopping:
    return Stopping()


@pytest.fixture
def http(replica: FakeReplica, stopping: Stopping) -> Iterator[httpx.Client]:
    with serving(stopping.app) as engine_url:
        app = create_app(replica, engine_url=engine_url, admin=Admin(None))
        with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


@ANY_MODEL
def test_it_is_no_success(http: httpx.Client, replica: FakeReplica, model: str) -> None:
    """The sidecar answers 503 and when to come back, counts that, and looks at the engine."""
    answer = http.post("/v1/completions", json={"model": model, "prompt": "x"})
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) > 0
    assert answer.headers["x-lora-fs-error"] == "EngineUnavailable"
    assert "aborted" in answer.json()["error"]["message"]
    assert "cut o" not in answer.text
    assert replica.looks == 1
    assert replica.answers == ([("v1", 503)] if model == "a1" else [])


@ANY_MODEL
def test_a_stream_ends_with_an_error(http: httpx.Client, replica: FakeReplica, model: str) -> None:
    """What came is passed on; then the openai client raises."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x", max_retries=0) as client:
        stream = client.completions.create(model=model, prompt="x", stream=True)
        assert next(stream).choices[0].text == "one"
        with pytest.raises(openai.APIError, match="aborted"):
            next(stream)
    assert replica.answers == ([("v1", 200), ("v1", 502)] if model == "a1" else [])
    told = http.post("/v1/completions", json={"model": model, "stream": True}).text
    assert told.endswith('"code":503}}\n\ndata: [DONE]\n\n')


def test_a_long_one_is_cut(http: httpx.Client, stopping: Stopping, replica: FakeReplica) -> None:
    """Its status was sent before the engine aborted it: the client gets no end."""
    stopping.text = "x" * (40 * KEPT_BYTES)
    with pytest.raises(httpx.RemoteProtocolError):
        http.post("/v1/completions", json={"model": "a1"})
    assert replica.answers == [("v1", 200), ("v1", 502)]


@ANY_MODEL
@pytest.mark.parametrize(
    "says",
    [
        "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "The server had an error while processing your request.",
    ],
    ids=["0.32", "0.33"],
)
def test_the_engines_end_is_no_defect(
    http: httpx.Client, stopping: Stopping, replica: FakeReplica, model: str, says: str
) -> None:
    """vLLM kills its engine right after the signal: where the abort did not come through it answers 500."""
    stopping.fails = says
    answer = http.post("/v1/completions", json={"model": model, "prompt": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "the engine ended" in answer.json()["error"]["message"]
    assert replica.looks == 1
    assert replica.answers == ([("v1", 503)] if model == "a1" else [])


@ANY_MODEL
def test_any_other_failure_is_vllms(http: httpx.Client, stopping: Stopping, model: str) -> None:
    """Also one whose text quotes that one."""
    stopping.fails = 'it said: "message":"EngineCore encountered an issue"'
    answer = http.post("/v1/completions", json={"model": model, "prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, stopping.fails)


def test_an_engine_that_breaks_off(http: httpx.Client, stopping: Stopping) -> None:
    """Before enough came to judge it the sidecar answers 503, as before anything came."""
    stopping.breaks = True
    assert http.post("/v1/completions", json={"model": "a1"}).status_code == 503


@ANY_MODEL
def test_a_text_may_say_it(http: httpx.Client, stopping: Stopping, model: str) -> None:
    """Only the field counts: a model may write JSON."""
    stopping.text, stopping.why = json.dumps({"finish_reason": "abort"}), "length"
    answer = http.post("/v1/completions", json={"model": model})
    assert answer.json() == answered(stopping.text, "length")
    assert int(answer.headers["content-length"]) == len(answer.content)


def passed(content_type: str, pieces: list[bytes]) -> tuple[int, bytes, bool]:
    """The status, the bytes and whether the answer ended, after pieces of an engine's."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def answer() -> None:
        whole = Unaborted(send)
        headers = [(b"Content-Type", content_type.encode())]
        await whole({"type": "http.response.start", "status": 200, "headers": headers})
        for number, piece in enumerate(pieces, start=1):
            more = number < len(pieces)
            await whole({"type": "http.response.body", "body": piece, "more_body": more})

    asyncio.run(answer())
    bodies = messages[1:]
    return messages[0]["status"], b"".join(one["body"] for one in bodies), not bodies[-1]["more_body"]


class Piece(bytes):
    """A piece that nothing is put before: that would copy all pieces so far, once for each."""

    def __radd__(self, other: object) -> NoReturn:
        raise AssertionError("all pieces so far are copied")


def test_a_long_line_is_copied_once() -> None:
    """One of 32 MB took 2.3 s of the loop, and 21 ms at a time."""
    pieces = [Piece(one) for one in (b"data: ", b"1", b"2", b"\n\n")]
    assert passed("text/event-stream", [*pieces]) == (200, b"data: 12\n\n", True)
    stored = Stored(bool)
    assert b"".join(map(stored.feed, pieces)) + stored.end() == b"data: 12\n\n"


def cut(data: bytes, lengths: list[int]) -> list[bytes]:
    """Data in pieces of these lengths, and the rest."""
    pieces, at = [], 0
    for length in lengths:
        pieces.append(data[at : at + length])
        at += length
    return [*pieces, data[at:]]


cuts = st.lists(st.integers(0, 40), max_size=20)
texts = st.text(alphabet='"finish_reason:abort\\ {}\n', max_size=40)


@given(texts, cuts, st.sampled_from(["application/json", "text/event-stream; charset=utf-8"]), st.booleans())
def test_any_cut_of_an_answer(text: str, lengths: list[int], content_type: str, aborts: bool) -> None:
    """However it comes in pieces: an aborted one does not end well, any other is the engine's bytes."""
    data = packed(answered(text, "abort" if aborts else "stop"))
    if content_type.startswith("text"):
        data = b"data: " + data + b"\n\ndata: [DONE]\n\n"
    status, body, has_ended = passed(content_type, cut(data, lengths))
    if not aborts:
        assert (status, body, has_ended) == (200, data, True)
    elif content_type.startswith("text"):
        assert body.startswith(b'data: {"error":')
        assert body.endswith(b"\n\ndata: [DONE]\n\n")
    else:
        assert (status, has_ended) == (503, True)


@given(st.integers(KEPT_BYTES - 60, KEPT_BYTES + 60), st.integers(1, 60))
def test_it_is_seen_where_it_begins_to_be_sent(length: int, rest: int) -> None:
    """Where the field stands on both sides of what is kept back, the answer does not end."""
    data = packed(answered("x" * length, "abort"))
    status, _, has_ended = passed("application/json", [data[:-rest], data[-rest:]])
    assert status == 503 or not has_ended


@pytest.mark.parametrize(("given", "told"), [({}, "1"), ({"Retry-After": "7"}, "7")])
def test_each_503_says_when_to_ask_again(given: dict[str, str], told: str) -> None:
    """A paused vLLM's own does not."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    asyncio.run(JSONResponse({"error": "paused"}, 503, given)(scope, receive, Unaborted(send)))
    headers = [(name.lower(), value) for name, value in sent[0]["headers"]]
    assert [value for name, value in headers if name == b"retry-after"] == [told.encode()]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
