"""What a canary adds to a request and its answer: who asks, which revision, the name that was asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.errors import WaitTimeout
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.canary import Renamed, Stored
from tests.server.conftest import FakeEngine, FakeReplica, serving, until


@pytest.fixture
def http(replica: FakeReplica, engine_url: str) -> Iterator[httpx.Client]:
    replica.testers = ("tester",)
    app = create_app(replica, engine_url=engine_url, admin=Admin(None), user_header="X-Who")
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def test_each_user_has_a_revision(http: httpx.Client, engine: FakeEngine, replica: FakeReplica) -> None:
    """It is in a header; the engine is asked for its own name, and the answer names what was asked for."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x") as client:
        for user, revision, engine_name in (("tester", "v2", "a1@v2"), ("other", "v1", "a1")):
            answer = client.completions.with_raw_response.create(model="a1", prompt="x", user=user)
            assert answer.headers["x-lora-fs-revision"] == revision
            assert answer.headers["x-lora-fs-adapter"] == f"default/tiny/{revision}/a1"
            assert answer.parse().model == "a1"
            assert engine.bodies[-1]["model"] == engine_name
    until(lambda: replica.holds == {"a1": 0, "a1@v2": 0}, "they are let go")  # after the answer's last byte


def test_an_engine_that_forgot_names_what_was_asked_for(http: httpx.Client, engine: FakeEngine) -> None:
    """Its message, too, when it does not know the adapter after it was loaded again."""
    engine.missing.add("a1@v2")
    answer = http.post("/v1/completions", json={"model": "a1", "user": "tester"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model `a1` does not exist."


@pytest.mark.parametrize(
    ("headers", "user", "asked"),
    [
        ({"X-Who": "tester"}, "other", "tester"),
        ({"X-Who": ""}, "other", "other"),
        ({}, "", None),
        ({}, ["tester"], None),
        ({}, None, None),
    ],
)
def test_who_asks(
    http: httpx.Client, replica: FakeReplica, headers: dict[str, str], user: object, asked: str | None
) -> None:
    """The header that is set for it, else the body's user; what is no text is nobody."""
    http.post("/v1/completions", json={"model": "a1", "user": user}, headers=headers)
    assert replica.users == [asked]


def test_a_form_is_told_by_its_header(http: httpx.Client, replica: FakeReplica) -> None:
    """A form's own fields are not looked into for a user."""
    fields = {"model": "a1", "user": "other"}
    answer = http.post(
        "/v1/audio/transcriptions", data=fields, files={"file": b"RIFF"}, headers={"X-Who": "tester"}
    )
    assert answer.headers["x-lora-fs-revision"] == "v2"
    assert replica.users == ["tester"]


def test_a_base_model_has_none(http: httpx.Client, replica: FakeReplica) -> None:
    """Only adapters are counted and tried."""
    answer = http.post("/v1/completions", json={"model": "tiny", "user": "tester"})
    assert "x-lora-fs-revision" not in answer.headers
    assert replica.users == []


def test_revisions_have_series(http: httpx.Client) -> None:
    """Requests, errors by the class of their status, and loads, by the adapter's name and revision."""
    text, of = http.get("/metrics").text, 'adapter_name="a1",revision="v1"'
    for series in (
        f"lora_fs_revision_requests_total{{{of}}} 5.0",
        f'lora_fs_revision_errors_total{{{of},status="4xx"}} 2.0',
        f'lora_fs_revision_errors_total{{{of},status="5xx"}} 1.0',
        f"lora_fs_revision_load_seconds_count{{{of}}} 2.0",
        f"lora_fs_revision_load_seconds_sum{{{of}}} 0.5",
        "lora_fs_revisions_without_series 0.0",
    ):
        assert f"\n{series}\n" in text, series


def test_answers_are_counted_by_what_was_chosen(
    http: httpx.Client, engine: FakeEngine, replica: FakeReplica
) -> None:
    """The engine's answers and the sidecar's own errors count for the revision that was chosen."""
    http.post("/v1/completions", json={"model": "a1", "user": "tester"})
    engine.missing.add("a1@v2")
    http.post("/v1/completions", json={"model": "a1", "user": "tester"})
    replica.refusal = WaitTimeout("a1 is still loading after 5 s")
    http.post("/v1/completions", json={"model": "a1", "user": "other"})
    http.post("/v1/completions", json={"model": "tiny"})
    assert replica.answers == [("v2", 200), ("v2", 404), ("v1", 503)]


texts = st.text(alphabet='"model:a1@v2\\ {}', max_size=40)


@given(texts, texts, st.lists(st.integers(1, 7), max_size=60), st.booleans())
def test_any_cut_of_an_answer(before: str, after: str, cuts: list[int], spaced: bool) -> None:
    """However it comes in pieces: the field is another, whatever texts say stays, nothing is lost."""
    body = {"id": before, "model": "a1@v2", "choices": [{"text": after}], "inner": {"model": "a1@v2"}}
    data = json.dumps(body, separators=(", ", ": ") if spaced else (",", ":")).encode()
    renamed, at, out = Renamed("a1@v2", "a1"), 0, b""
    for cut in cuts:
        out += renamed.feed(data[at : at + cut])
        at += cut
    out += renamed.feed(data[at:]) + renamed.end()
    assert json.loads(out) == {**body, "model": "a1", "inner": {"model": "a1"}}


def test_whole_events_are_not_kept_back() -> None:
    """An event of a stream is sent as it comes."""
    renamed = Renamed("a1@v2", "a1")
    assert renamed.feed(b'data: {"model":"a1@v2"}\n\n') == b'data: {"model":"a1"}\n\n'
    assert renamed.feed(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert renamed.end() == b""


@given(texts, st.lists(st.integers(1, 7), max_size=60), st.booleans())
def test_any_cut_of_a_stored_answer(text: str, cuts: list[int], spaced: bool) -> None:
    """Its request named no model: every name that only the engine has is the public one, and texts stay."""
    digest, known = "0a" * 6, "elsewhere@" + "0b" * 6
    separators = (", ", ": ") if spaced else (",", ":")

    def told(*names: str) -> bytes:
        bodies = [{"id": text, "model": name, "text": f'"model":"{name}'} for name in names]
        return b"".join(json.dumps(body, separators=separators).encode() + b"\n\n" for body in bodies)

    data = told(f"a/sql@v2@{digest}", "tiny", known, f"sql@{digest}").rstrip()
    stored, at, out = Stored(lambda name: name in {"tiny", known}), 0, b""
    for cut in cuts:
        out += stored.feed(data[at : at + cut])
        at += cut
    out += stored.feed(data[at:]) + stored.end()
    right = ["a/sql@v2", "tiny", known, "sql"]
    lines = [json.loads(line) for line in out.split(b"\n\n")]
    assert [(line["id"], line["model"]) for line in lines] == [(text, name) for name in right]


def test_a_stored_answer_has_no_name_of_the_engines(replica: FakeReplica) -> None:
    """vLLM keeps an answer with the name that it was asked for: a client that fetches it sees its own."""
    body = {"id": "resp_1", "model": f"a1@v2@{'0a' * 6}", "output": [{"text": "x"}]}
    stores = Starlette(routes=[Route("/v1/responses/{name}", lambda _: JSONResponse(body))])
    with serving(stores) as engine:
        app = create_app(replica, engine_url=engine, admin=Admin(None))
        with serving(app) as url:
            assert httpx.get(f"{url}/v1/responses/resp_1", **LOCAL).json() == {**body, "model": "a1@v2"}
