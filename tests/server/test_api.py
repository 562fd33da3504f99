"""The API and the proxy, on real sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import openai
import pytest

from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, VolumeUnavailable
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.auth import Admin
from tests.server.conftest import FakeEngine, FakeReplica, serving


@pytest.fixture
def http(replica: FakeReplica, engine_url: str) -> Iterator[httpx.Client]:
    app = create_app(replica, engine_url=engine_url, admin=Admin(None), max_body_bytes=100_000)
    with serving(app) as url, httpx.Client(base_url=url, timeout=20) as client:
        yield client


def until(condition: object, what: str) -> None:
    """Wait, bounded, for something another thread makes true."""
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.005)


def test_models_are_listed_for_the_openai_client(http: httpx.Client) -> None:
    """The base model comes first, then the adapters, and one can be retrieved."""
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="x") as client:
        assert [card.id for card in client.models.list()] == ["tiny", "a1"]
        assert client.models.retrieve("a1").id == "a1"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


def test_two_replicas_list_the_same_bytes(engine_url: str) -> None:
    """Whoever is asked, the list is the same to the byte."""
    answers = []
    for replica in (FakeReplica(("b", "a1")), FakeReplica(("a1", "b"), replica_id="other")):
        with serving(create_app(replica, engine_url=engine_url, admin=Admin(None))) as url:
            answers.append(httpx.get(f"{url}/v1/models").content)
    assert answers[0] == answers[1]


def test_some_of_the_adapters(engine_url: str) -> None:
    """By pattern, labels and phase; what is no selector or no phase is told."""
    phases = {"b1": Phase.FAILED}
    app = create_app(FakeReplica(("a1", "b1", "b2"), phases), engine_url=engine_url, admin=Admin(None))
    with serving(app) as url, httpx.Client(base_url=url) as http:

        def names(**query: str) -> list[str]:
            answer = http.get("/v1/lora_adapters", params=query).raise_for_status()
            return [one["name"] for one in answer.json()["data"]]

        assert names() == ["a1", "b1", "b2"]
        assert names(name="b*") == ["b1", "b2"]
        assert names(name="b*", phase="Failed") == ["b1"]
        assert names(labelSelector="!team") == ["a1", "b1", "b2"]
        assert names(labelSelector="team") == []
        refused = http.get("/v1/lora_adapters", params={"labelSelector": "a=b=c"})
        assert refused.status_code == 400
        assert "not a label selector" in refused.json()["error"]["message"]
        assert http.get("/v1/lora_adapters", params={"phase": "Broken"}).status_code in {400, 422}


def test_chunks_pass_before_the_engine_ends(
    http: httpx.Client, engine: FakeEngine, replica: FakeReplica
) -> None:
    """The first chunk arrives while the engine holds back the second; the adapter is held."""
    body = {"model": "a1", "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_raw()
        assert next(chunks) == b"data: one\n\n"
        assert replica.holds["a1"] == 1
        engine.go.set()
        assert b"".join(chunks) == b"data: [DONE]\n\n"
        assert answer.headers["x-lora-fs-adapter"] == "default/tiny/v1/a1"
    until(lambda: replica.holds["a1"] == 0, "the hold is released")


def test_a_client_that_leaves_ends_the_engines_request(
    http: httpx.Client, engine: FakeEngine, replica: FakeReplica
) -> None:
    """A disconnect reaches the engine and releases the adapter."""
    with http.stream("POST", "/v1/completions", json={"model": "a1", "stream": True}) as answer:
        next(answer.iter_raw())
    assert engine.left.wait(10)
    until(lambda: replica.holds["a1"] == 0, "the hold is released")


def test_an_unknown_model_never_reaches_the_engine(http: httpx.Client, engine: FakeEngine) -> None:
    """It is a 404 in vLLM's words, from memory."""
    answer = http.post("/v1/completions", json={"model": "nobody"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == "The model `nobody` does not exist."
    assert engine.bodies == []


def test_before_the_registry_was_read(http: httpx.Client, replica: FakeReplica, engine: FakeEngine) -> None:
    """A name that is not known may be an adapter's: 503. The engine's own, and what is known, are served."""
    replica.unread = VolumeUnavailable("the registry has not been read yet")
    for answer in (
        http.post("/v1/completions", json={"model": "nobody"}),
        http.get("/v1/models/nobody"),
        http.get("/v1/dashboard/adapters/nobody"),
    ):
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
        assert "not been read yet" in answer.json()["error"]["message"]
    assert engine.bodies == []
    for name in ("tiny", "a1"):
        assert http.post("/v1/completions", json={"model": name}).status_code == 200
        assert http.get(f"/v1/models/{name}").status_code == 200


def test_an_empty_name_is_the_base_models(http: httpx.Client, engine: FakeEngine) -> None:
    """To vLLM it is one, as none is, and so it is with the plugin."""
    assert http.post("/v1/completions", json={"model": ""}).status_code == 200
    assert engine.bodies == [{"model": ""}]


def test_an_engine_that_forgot_is_told_again(
    http: httpx.Client, engine: FakeEngine, replica: FakeReplica
) -> None:
    """A 404 of the engine for a known adapter makes the sidecar load it once more, not twice."""
    engine.missing.add("a1")
    assert http.post("/v1/completions", json={"model": "a1"}).status_code == 404
    assert replica.forgotten == ["a1"]
    assert len(engine.bodies) == 2


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(EngineUnavailable("slow"), 503), (EngineRejected("no", reason="rank"), 400)],
)
def test_a_refused_load_is_the_requests_own_error(
    http: httpx.Client, replica: FakeReplica, refusal: Exception, status: int
) -> None:
    """Temporary refusals say when to come back; final ones do not."""
    replica.refusal = refusal
    answer = http.post("/v1/completions", json={"model": "a1"})
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) is (status == 503)


def test_a_body_over_the_bound_is_413(http: httpx.Client, engine: FakeEngine) -> None:
    """It is refused before the engine sees it."""
    answer = http.post("/v1/completions", json={"model": "a1", "prompt": "x" * 200_000})
    assert answer.status_code == 413
    assert engine.bodies == []


def test_an_engine_that_is_down_is_503(replica: FakeReplica) -> None:
    """A refused connection says so, with Retry-After, in words that the operator's pages have."""
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None))
    with serving(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"})
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    told = answer.json()["error"]["message"]
    assert told == "no engine answers at http://127.0.0.1:9: Connection refused"


def test_an_engine_that_sends_on_to_itself(http: httpx.Client) -> None:
    """Its own address is loopback: a client that followed it would reach nothing, or pass the sidecar by."""
    answer = http.post("/v1/completions/", json={"model": "tiny"}, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/v1/completions")
    assert http.post("/v1/completions/", json={"model": "tiny"}, follow_redirects=True).status_code == 200


def test_headers_that_every_server_writes_are_there_once(http: httpx.Client) -> None:
    """Of an answer that is passed on, too."""
    names = [name.lower() for name, _ in http.post("/v1/completions", json={"model": "a1"}).headers.raw]
    assert sorted(names) == sorted(set(names))


def test_an_engine_that_speaks_no_tls(engine_url: str) -> None:
    """The reason is TLS's own: its numbers are not the system's, of which 1 is "Operation not permitted"."""

    async def ask() -> None:
        async with aiohttp.ClientSession() as session:
            await VllmHttp(session, engine_url.replace("http:", "https:"), timeout_s=5).loaded()

    with pytest.raises(EngineUnavailable, match=r"(?i)\bssl"):
        asyncio.run(ask())


def test_admin_calls_need_the_token(replica: FakeReplica, engine_url: str, tmp_path: Path) -> None:
    """Without it 401; with it 200; a rotated file counts at once."""
    token = tmp_path / "token"
    token.write_text("first\n")
    body = {"lora_name": "a1"}
    with serving(create_app(replica, engine_url=engine_url, admin=Admin(token))) as url:

        def call(given: str) -> int:
            headers = {"Authorization": f"Bearer {given}"}
            return httpx.post(f"{url}/v1/unload_lora_adapter", json=body, headers=headers).status_code

        assert (call("wrong"), call("first"), call("firs")) == (401, 200, 401)
        token.write_text("second\n")
        assert (call("first"), call("second")) == (401, 200)
        assert httpx.get(f"{url}/v1/models").status_code == 200


def test_a_series_goes_with_its_adapter(http: httpx.Client, replica: FakeReplica) -> None:
    """No metric is left behind for a name that is not served any more."""
    assert 'lora_fs_adapter_loaded{adapter_name="a1"} 1.0' in http.get("/metrics").text
    replica.names = ()
    assert 'adapter_name="a1"' not in http.get("/metrics").text


def test_bad_bodies_have_vllms_error_shape(http: httpx.Client) -> None:
    """A missing field is a 400 that names it."""
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "a1"})
    assert answer.status_code == 400
    assert "lora_path" in answer.json()["error"]["message"]


def test_openapi_lists_every_route(http: httpx.Client) -> None:
    """The documented paths are those of the API."""
    paths = http.get("/openapi.json").json()["paths"].keys()
    assert paths >= {
        "/v1/models",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/lora_adapters",
        "/v1/list_lora_adapters",
        "/metadata",
        "/health",
        "/readyz",
        "/metrics",
    }
