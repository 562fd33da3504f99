"""The API and the proxy, on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import aiohttp
import httpx
import openai
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from yarl import URL

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.engine import activity
from lora_fs.sidecar.engine.protocol import Activity, Facts, Queue
from lora_fs.sidecar.engine.vllm_http import VllmHttp
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, InvalidAdapter, VolumeUnavailable
from lora_fs.sidecar.model import Finding, Phase, Severity, engine_name
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from tests.reconcile.test_plan import RECORD
from tests.server.conftest import FakeEngine, FakeReplica, serving, until

Result = TypeVar("Result")

DAMAGED = InvalidAdapter("a1", [Finding(code="header", severity=Severity.ERROR, file="x", message="damaged")])
ENGINE_NAME = engine_name("a1@v2", RECORD.spec.digest)
CARDS = Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "tiny"}]}))


@pytest.fixture
def http(replica: FakeReplica, engine_url: str) -> Iterator[httpx.Client]:
    app = create_app(
        replica, engine_url=engine_url, admin=Admin(None, insecure="loopback"), max_body_bytes=100_000
    )
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def asked(
    call: Callable[[VllmHttp], Awaitable[Result]], *routes: Route, list_timeout_s: float = 60
) -> Result:
    """What the client gets of an engine that has these routes."""

    async def ask(url: str) -> Result:
        async with aiohttp.ClientSession() as session:
            return await call(VllmHttp(session, url, timeout_s=60, list_timeout_s=list_timeout_s))

    with serving(Starlette(routes=routes)) as url:
        return asyncio.run(ask(url))


def vllms_error(message: str, code: int) -> dict[str, object]:
    """Source: create_error_response of vLLM 0.32."""
    return {"error": {"message": message, "type": "InternalServerError", "param": None, "code": code}}


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
        with serving(
            create_app(replica, engine_url=engine_url, admin=Admin(None, insecure="loopback"))
        ) as url:
            answers.append(httpx.get(f"{url}/v1/models", **LOCAL).content)
    assert answers[0] == answers[1]


def test_some_of_the_adapters(engine_url: str) -> None:
    """By pattern, labels and phase, by its earlier name too; what is no selector or no phase is told."""
    phases = {"a1": Phase.UNLOADED, "b1": Phase.FAILED}
    app = create_app(
        FakeReplica(("a1", "b1", "b2"), phases), engine_url=engine_url, admin=Admin(None, insecure="loopback")
    )
    with serving(app) as url, httpx.Client(base_url=url, **LOCAL) as http:

        def names(**query: str) -> list[str]:
            answer = http.get("/v1/lora_adapters", params=query).raise_for_status()
            return [one["name"] for one in answer.json()["data"]]

        assert names() == ["a1", "b1", "b2"]
        assert names(name="b*") == ["b1", "b2"]
        assert names(name="b*", phase="Failed") == ["b1"]
        assert names(phase="Unloaded") == names(phase="Evicted") == ["a1"]
        told = http.get("/v1/lora_adapters", params={"phase": "Evicted"}).json()["data"]
        assert [one["status"]["phase"] for one in told] == ["Unloaded"]
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
    assert engine.left.wait(60)
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


def test_another_404_of_the_engine_is_the_clients(
    http: httpx.Client, engine: FakeEngine, replica: FakeReplica
) -> None:
    """Of a response that is not there, or a task that the model does not have: the adapter stays loaded."""
    answer = http.post("/v1/completions", json={"model": "a1", "previous_response_id": "x"})
    assert (answer.status_code, answer.headers["x-lora-fs-adapter"]) == (404, "default/tiny/v1/a1")
    assert answer.json()["error"]["message"] == "Response with id 'x' not found."
    assert (replica.forgotten, len(engine.bodies)) == ([], 1)


def test_headers_go_on_as_they_came(engine_url: str, replica: FakeReplica, engine: FakeEngine) -> None:
    """None is added but that an answer is not to be coded, and what Connection names stays here."""
    body = b'{"model": "a1"}'
    head = (
        "POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", "X-Mine: 1",
        "Connection: close, X-Hop", "X-Hop: 1",
    )  # fmt: skip
    app = create_app(replica, engine_url=engine_url, admin=Admin(None, insecure="loopback"))
    with serving(app) as url, socket.create_connection(("127.0.0.1", URL(url).port)) as client:
        client.sendall("\r\n".join((*head, "", "")).encode() + body)
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    (headers,) = engine.headers
    assert headers["accept-encoding"] == "identity"
    assert headers["x-mine"] == "1"
    assert headers.keys().isdisjoint({"x-hop", "user-agent", "accept", "content-type"})


def test_a_large_body_arrives_whole(engine_url: str, replica: FakeReplica, engine: FakeEngine) -> None:
    """In pieces, with its length; as it came and with another revision's name."""
    replica.testers = ("ann",)
    body = {"model": "a1", "prompt": "x" * 3_000_000, "last": 1}
    with serving(create_app(replica, engine_url=engine_url, admin=Admin(None, insecure="loopback"))) as url:
        for user in ({}, {"user": "ann"}):
            assert httpx.post(f"{url}/v1/completions", json={**body, **user}, **LOCAL).status_code == 200
    assert engine.bodies == [body, {**body, "model": "a1@v2", "user": "ann"}]
    assert [int(headers["content-length"]) > 3_000_000 for headers in engine.headers] == [True, True]


def cut_off(replica: FakeReplica, sent: bytes) -> httpx.Response:
    """What a client gets if its engine sends so much, and ends."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()

    async def ask() -> httpx.Response:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with serving(create_app(replica, engine_url=url, admin=Admin(None))) as url:
            async with server, httpx.AsyncClient(base_url=url, **LOCAL) as http:
                return await http.post("/v1/completions", json={"model": "a1"})

    return asyncio.run(ask())


def test_an_engine_that_ends_behind_the_head(replica: FakeReplica) -> None:
    """Nothing of the answer was sent: the client is told to ask again. It got a 200 that was cut."""
    answer = cut_off(replica, b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n")
    assert answer.status_code == 503
    assert "broke off" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert replica.answers == [("v1", 503)]


def test_an_answer_keeps_a_length(replica: FakeReplica) -> None:
    """One that came whole is sent with its length under the client's name, too, not in chunks."""
    body = b'{"model":"v1","n":1}'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    answer = cut_off(replica, head % len(body) + body)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert "transfer-encoding" not in answer.headers


def test_an_engine_that_ends_in_an_answer(replica: FakeReplica, caplog: pytest.LogCaptureFixture) -> None:
    """The client sees that it broke off, the log has one line and no traceback, and it counts as 502."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nthe beginning")
        await writer.drain()
        writer.close()

    async def ask() -> bytes:
        server = await asyncio.start_server(cut, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        app = create_app(
            replica, engine_url=f"http://127.0.0.1:{port}", admin=Admin(None, insecure="loopback")
        )
        with serving(app) as url:
            async with (
                server,
                httpx.AsyncClient(base_url=url, **LOCAL) as http,
                http.stream("POST", "/v1/completions", json={"model": "a1"}) as answer,
            ):
                chunks = answer.aiter_raw()
                got = await anext(chunks)
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(chunks)
                return got

    with caplog.at_level("WARNING"):
        assert asyncio.run(ask()) == b"the beginning"
    assert [one.message.partition(":")[0] for one in caplog.records] == ["the engine broke off its answer"]
    assert not [one for one in caplog.records if one.exc_info]
    assert (replica.looks, replica.ready) == (1, True)  # it is looked at: others may be answered
    assert replica.answers == [("v1", 200), ("v1", 502)]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(EngineUnavailable("slow"), 503), (EngineRejected("no", reason="rank"), 400), (DAMAGED, 400)],
)
def test_a_refused_load_is_the_requests_own_error(
    http: httpx.Client, replica: FakeReplica, refusal: Exception, status: int
) -> None:
    """Temporary refusals say when to come back; final ones do not, and are bad requests, as vLLM has them."""
    replica.refusal = refusal
    answer = http.post("/v1/completions", json={"model": "a1"})
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) is (status == 503)
    assert answer.json()["error"]["type"] == {503: "ServiceUnavailableError", 400: "BadRequestError"}[status]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a9", "lora_path": "/x"}, 400),
        ("/adapters", {"name": "a9", "src": "/x"}, 400),
        ("/v1/loras", {"lora_name": "a9", "source": {"uri": "file:///x"}}, 422),
    ],
)
def test_an_adapter_that_is_invalid(
    http: httpx.Client, replica: FakeReplica, path: str, body: dict[str, object], status: int
) -> None:
    """On vLLM's routes it is a bad request, as to vLLM; on others 422."""
    replica.load_refusal = DAMAGED
    answer = http.post(path, json=body)
    kind = {400: "BadRequestError", 422: "UnprocessableEntityError"}[status]
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.headers["x-lora-fs-error"] == "InvalidAdapter"


def test_a_body_over_the_bound_is_413(http: httpx.Client, engine: FakeEngine) -> None:
    """It is refused before the engine sees it."""
    answer = http.post("/v1/completions", json={"model": "a1", "prompt": "x" * 200_000})
    assert answer.status_code == 413
    assert engine.bodies == []


@pytest.mark.parametrize("sent", [b"", b"{"])
def test_a_load_whose_body_does_not_come(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """It is given up, as one of a request to the engine is."""
    monkeypatch.setattr("lora_fs.sidecar.server.middleware.admin.BODY_S", 0.2)
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url, socket.create_connection((URL(url).host, URL(url).port), timeout=60) as sock:
        head = b"POST /v1/load_lora_adapter HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
        sock.sendall(head + b"Content-Type: application/json\r\n\r\n" + sent)
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"too slowly: %d bytes" % len(sent) in answer


def test_an_engine_that_is_down_is_503(replica: FakeReplica) -> None:
    """A refused connection says so, with Retry-After, in words that the operator's pages have."""
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"}, **LOCAL)
    assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    told = answer.json()["error"]["message"]
    assert told == "no engine answers at http://127.0.0.1:9: Connection refused"
    assert (replica.looks, replica.ready) == (1, False)


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
            await VllmHttp(session, engine_url.replace("http:", "https:"), timeout_s=60).loaded()

    with pytest.raises(EngineUnavailable, match=r"(?i)\bssl"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "body", "raised"),
    [
        (500, {}, EngineUnavailable),
        (503, vllms_error("busy", 503), EngineUnavailable),
        (500, vllms_error("EngineCore encountered an issue. See stack trace", 500), EngineUnavailable),
        (500, vllms_error("Call to add_lora method failed: LoRA rank 64 is greater", 500), EngineRejected),
        (400, vllms_error("Loading lora {name} failed: No adapter found for {path}", 400), EngineRejected),
    ],
)
def test_what_the_engine_refuses_and_what_may_do_later(
    tmp_path: Path, status: int, body: dict[str, object], raised: type[Exception]
) -> None:
    """A vLLM 0.32 refuses a load with 500 as well; in its shape that is final, unless it is dead.

    No answer says where the copy lies, nor under which name the engine was to load it.
    """
    body = json.loads(json.dumps(body).replace("{path}", str(tmp_path)).replace("{name}", ENGINE_NAME))
    fails = Route("/v1/load_lora_adapter", lambda _: JSONResponse(body, status), methods=["POST"])
    with pytest.raises(raised) as told:
        asked(lambda engine: engine.load(ENGINE_NAME, str(tmp_path), RECORD), fails)
    assert str(tmp_path) not in str(told.value)
    assert ENGINE_NAME not in str(told.value)


@pytest.mark.parametrize(
    ("targets", "more"),
    [
        (("base_layer", "experts", "q_proj"), {"is_3d_lora_weight": True}),
        (("w1", "w2", "w3"), {}),
    ],
)
def test_the_engine_learns_the_layout_of_experts(targets: tuple[str, ...], more: dict[str, object]) -> None:
    """vLLM does not look whether all experts of a layer are one tensor: who loads the adapter says so."""
    bodies: list[object] = []
    lora = RECORD.spec.lora.model_copy(update={"target_modules": targets})
    record = RECORD.model_copy(update={"spec": RECORD.spec.model_copy(update={"lora": lora})})

    async def load(request: Request) -> Response:
        bodies.append(await request.json())
        return PlainTextResponse("loaded")

    route = Route("/v1/load_lora_adapter", load, methods=["POST"])
    asked(lambda engine: engine.load(ENGINE_NAME, "/staged", record), route)
    assert bodies == [{"lora_name": ENGINE_NAME, "lora_path": "/staged", **more}]


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (JSONResponse({"version": "0.31.0+cpu"}), "0.31.0+cpu"),
        (JSONResponse({"version": "x" * 1000}), "x" * 80),
        (JSONResponse({"version": 31}), None),
        (JSONResponse(["0.31.0"]), None),
        (PlainTextResponse("0.31.0"), None),
        (JSONResponse({"version": "0.31.0"}, 404), None),
    ],
    ids=["version", "long", "number", "list", "text", "no route"],
)
def test_what_an_engine_says_its_version_is(answer: Response, version: str | None) -> None:
    """Its own words, or that it says none: whether they are a version is not asked here."""
    assert asked(VllmHttp.version, Route("/version", lambda _: answer)) == version


def test_an_engine_that_fails_to_say_its_version() -> None:
    """It may say it later: that is no engine without one."""
    with pytest.raises(EngineUnavailable, match="/version answered 503"):
        asked(VllmHttp.version, Route("/version", lambda _: PlainTextResponse("", 503)))


def test_an_engine_that_cannot_load_adapters_says_its_models() -> None:
    """Each look asks for the route until it is there: an engine that was started anew may have it."""
    answers = [Response(status_code=405), JSONResponse({"detail": "Not Found"}, 404)]

    async def look(engine: VllmHttp) -> None:
        without, with_it = await engine.loaded(), await engine.loaded()
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in str(without.cannot_load)
        assert with_it.cannot_load is None
        for seen in (without, with_it):
            assert [card["id"] for card in seen.base_cards] == ["tiny"]

    asked(look, CARDS, Route("/v1/load_lora_adapter", lambda _: answers.pop()))


def test_an_engine_in_development_mode_says_its_limits() -> None:
    """The rank and the dtype are told beside how many adapters it keeps, and stay unknown elsewhere."""
    lora = {"max_cpu_loras": 8, "max_lora_rank": 64}
    config = {"lora_config": lora, "model_config": {"dtype": "torch.bfloat16"}}

    async def look(engine: VllmHttp) -> None:
        assert (await engine.loaded()).facts == Facts()
        assert await engine.holds_most() == 8
        assert (await engine.loaded()).facts == Facts(64, "bfloat16")

    asked(look, CARDS, Route("/server_info", lambda _: JSONResponse({"vllm_config": config})))


@pytest.mark.parametrize(
    ("status", "text"),
    [(500, "Internal Server Error"), (503, ""), (401, ""), (200, 'vllm:lora_requests_info{a="2"} zz\n')],
)
def test_metrics_that_cannot_be_read(status: int, text: str) -> None:
    """What is in use is unknown, which is not idle."""
    with pytest.raises(EngineUnavailable, match=r"answered|cannot be read"):
        activity_of(PlainTextResponse(text, status))


@pytest.mark.parametrize(
    ("text", "queue"),
    [
        ("", None),
        ("vllm:num_requests_running 1\n", None),
        ("vllm:num_requests_running nan\nvllm:num_requests_waiting 1\n", None),
        ("vllm:num_requests_running inf\nvllm:num_requests_waiting 1\n", None),
        ("vllm:num_requests_running 1\nvllm:num_requests_waiting 0.0\n", Queue(1, 0)),
        (
            'vllm:num_requests_running{engine="0"} 1.0\nvllm:num_requests_running{engine="1"} 2.0\n'
            'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_requests_waiting{engine="1"} 4.0\n'
            'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0\n'
            'vllm:lora_requests_info{max_lora="2",running_lora_adapters="sql",waiting_lora_adapters=""} 1\n',
            Queue(3, 7),
        ),
    ],
)
def test_an_engines_queue(text: str, queue: Queue | None) -> None:
    """Its data-parallel engines' together; unknown where its metrics lack one of the two numbers."""
    assert activity_of(PlainTextResponse(text)).queue == queue


def test_of_many_series_one_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps one for each set of adapters that it ever saw in use: the latest one holds."""
    parsed: list[str] = []

    def parse(text: str) -> Iterable[Metric]:
        parsed.extend(text.splitlines())
        return text_string_to_metric_families(text)

    monkeypatch.setattr(activity, "text_string_to_metric_families", parse)
    labels = 'max_lora="2",running_lora_adapters="a{0}",waiting_lora_adapters="b}} {0}"'
    series = f"vllm:lora_requests_info{{{{{labels}}}}} {{1}}"
    text = "\n".join(series.format(number, number % 500 + 1e9) for number in range(900))
    text += "\nvllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    found = activity_of(PlainTextResponse(text))
    assert found == Activity(frozenset({"a499", "b} 499"}), 2, Queue(1, 0))
    assert len(parsed) == 3


@pytest.mark.parametrize(("status", "text"), [(404, ""), (200, "vllm:num_requests_running 1\n")])
def test_an_engine_without_the_metric_is_idle(status: int, text: str) -> None:
    """It has no such route, or no adapter was asked for yet."""
    assert activity_of(PlainTextResponse(text, status)) == Activity()


@pytest.mark.parametrize(
    ("told", "pooling", "keeps", "completions"),
    [
        ({"max_cpu_loras": 8}, False, 8, 0),
        (None, False, 3, 1),
        (None, True, None, 1),
        ({"max_cpu_loras": None}, False, 3, 1),
    ],
    ids=["development mode", "metrics", "no completions", "told nothing"],
)
def test_how_many_adapters_an_engine_keeps(
    told: dict[str, object] | None, pooling: bool, keeps: int | None, completions: int
) -> None:
    """Its gauge has no series before its first step: one token of the base model makes one."""
    bodies: list[dict[str, object]] = []
    gauge = "# TYPE vllm:lora_requests_info gauge\n"
    series = 'vllm:lora_requests_info{max_lora="3",running_lora_adapters="",waiting_lora_adapters=""} 1.0\n'

    async def complete(request: Request) -> Response:
        bodies.append(await request.json())
        return JSONResponse({}, 404 if pooling else 200)

    def metrics(_: Request) -> Response:
        return PlainTextResponse(gauge + (series if bodies and not pooling else ""))

    def info(_: Request) -> Response:
        return JSONResponse({"vllm_config": {"lora_config": told}}, 200 if told else 404)

    models = JSONResponse({"data": [{"id": "tiny"}, {"id": "a1", "parent": "tiny", "root": "/a1"}]})
    routes = [
        Route("/v1/models", lambda _: models),
        Route("/server_info", info),
        Route("/metrics", metrics),
        Route("/v1/completions", complete, methods=["POST"]),
    ]

    async def look(engine: VllmHttp) -> list[int | None]:
        await engine.loaded()
        return [await engine.holds_most() for _ in range(1 if pooling else 2)]

    assert set(asked(look, *routes)) == {keeps}
    assert len(bodies) == completions
    assert all(body == {"model": "tiny", "prompt": [0], "max_tokens": 1} for body in bodies)


def test_an_engine_that_does_not_answer_says_no_smaller_number() -> None:
    """What it keeps is unknown then, and its metrics' --max-loras is not taken for it."""

    async def info(_: Request) -> Response:
        await asyncio.sleep(1)
        return JSONResponse({})

    with pytest.raises(EngineUnavailable, match="server_info"):
        asked(VllmHttp.holds_most, Route("/server_info", info), list_timeout_s=0.1)


def activity_of(answer: Response) -> Activity:
    """What the client makes of an answer of ``/metrics``."""
    return asked(VllmHttp.activity, Route("/metrics", lambda _: answer))


def test_admin_calls_need_the_token(replica: FakeReplica, engine_url: str, tmp_path: Path) -> None:
    """Without it 401; with it 200; a rotated file counts at once."""
    token = tmp_path / "token"
    token.write_text("first\n")
    body = {"lora_name": "a1"}
    with serving(create_app(replica, engine_url=engine_url, admin=Admin(token))) as url:

        def call(given: str) -> int:
            headers = {"Authorization": f"Bearer {given}"}
            return httpx.post(
                f"{url}/v1/unload_lora_adapter", json=body, headers=headers, **LOCAL
            ).status_code

        assert (call("wrong"), call("first"), call("firs")) == (401, 200, 401)
        token.write_text("second\n")
        assert (call("first"), call("second")) == (401, 200)
        assert httpx.get(f"{url}/v1/models", **LOCAL).status_code == 200


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


@pytest.mark.parametrize(
    ("sent", "kind", "why"),
    [
        ('{"lora_name": "a1"}', "application/x-www-form-urlencoded", "Content-Type: application/json"),
        (
            "{",
            "application/json",
            "no JSON: Expecting property name enclosed in double quotes, at character 1",
        ),
    ],
)
def test_bodies_that_are_no_json_are_told_so(http: httpx.Client, sent: str, kind: str, why: str) -> None:
    """``curl -d`` without a header is the commonest of them."""
    answer = http.post("/v1/load_lora_adapter", content=sent, headers={"content-type": kind})
    assert answer.status_code == 400
    told = answer.json()["error"]
    assert why in told["message"]
    assert told["param"] is None


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
