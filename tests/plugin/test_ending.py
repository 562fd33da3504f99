"""What waits when the server ends, and what does not."""

from __future__ import annotations

import asyncio
import re
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.serve import create_error_response
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core_client import MPClient
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.server.ports import Readiness
from lora_fs.worker_patch.api.ending import TOLD, Ending
from lora_fs.worker_patch.api.endpoint import Endpoint
from lora_fs.worker_patch.api.engine import InProcess
from tests.plugin import test_engine
from tests.plugin.test_gate import Site, Wire

pytestmark = pytest.mark.anyio

BOUND_S = 60
ROOT = Path(__file__).parents[2]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_request_that_waits_for_its_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is answered 503 at once, and so is the next; one that needs no adapter is vLLM's."""
    site, waits = Site(), asyncio.Event()

    @asynccontextmanager
    async def hold(name: str, timeout_s: float) -> AsyncIterator[str]:
        waits.set()
        await asyncio.sleep(BOUND_S * 2)
        yield name

    monkeypatch.setattr(site.replica, "hold", hold)
    async with site.http:
        asking = asyncio.create_task(site.http.post("/v1/completions", json={"model": "sql"}))
        await asyncio.wait_for(waits.wait(), BOUND_S)
        site.gate._ending.begin()
        answers = [
            await asyncio.wait_for(asking, BOUND_S),
            await site.http.post("/v1/completions", json={"model": "sql"}),
        ]
        for answer in answers:
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "this server ends" in answer.json()["error"]["message"]
        assert (await site.http.post("/v1/completions", json={"model": "tiny"})).status_code == 200


class Hangs:
    """An engine's ``hold`` that gets no answer, as when the engine dies meanwhile."""

    def __init__(self, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits, self._site = asyncio.Event(), site
        monkeypatch.setattr(site.engine, "hold", self._hold)

    async def _hold(self, request: LoRARequest) -> bool:
        assert self._site.engine.in_use == 1
        self.waits.set()
        await asyncio.sleep(BOUND_S * 2)
        return True


async def test_a_request_that_waits_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapter is loaded, and the engine is told that it is in use: no answer would come any more."""
    site = Site()
    hangs = Hangs(site, monkeypatch)
    async with site.http:
        asking = asyncio.create_task(site.http.post("/v1/completions", json={"model": "sql"}))
        await asyncio.wait_for(hangs.waits.wait(), BOUND_S)
        site.gate._ending.begin()
        answer = await asyncio.wait_for(asking, BOUND_S)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert (site.engine.in_use, site.replica.holding) == (0, [])


async def test_a_client_that_leaves_while_the_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for it any longer."""
    site, wire = Site(), Wire()
    hangs = Hangs(site, monkeypatch)
    asking = asyncio.create_task(wire.ask(site.gate))
    await asyncio.wait_for(hangs.waits.wait(), BOUND_S)
    wire.left.set()
    await asyncio.wait_for(asking, BOUND_S)
    assert wire.got[0]["status"] == 499
    assert (wire.listening, site.engine.in_use, site.replica.holding) == (0, 0, [])


def engine_of(rpc: Callable[..., Awaitable[list[dict[str, Any]]]], ending: Ending) -> InProcess:
    parallel = SimpleNamespace(_api_process_count=1, local_engines_only=False)
    client: Any = SimpleNamespace(collective_rpc=rpc, vllm_config=SimpleNamespace(parallel_config=parallel))
    models: Any = SimpleNamespace()
    return InProcess(client, models, "pod", timeout_s=BOUND_S * 2, ending=ending)


async def test_a_call_that_an_engine_leaves_unanswered() -> None:
    """Ends with the server, so that /readyz soon tells of the engine; what comes then is told the cause."""
    ending, asked = Ending(), asyncio.Event()

    async def rpc(*_: object, **__: object) -> list[dict[str, Any]]:
        if asked.is_set():
            raise RuntimeError("EngineCore encountered an issue")
        asked.set()
        await asyncio.sleep(BOUND_S * 2)
        return []

    engine = engine_of(rpc, ending)
    looking = asyncio.create_task(engine.loaded())
    await asyncio.wait_for(asked.wait(), BOUND_S)
    ending.begin()
    with pytest.raises(EngineUnavailable, match="this server ends"):
        await asyncio.wait_for(looking, BOUND_S)
    with pytest.raises(EngineUnavailable, match="EngineCore encountered an issue"):
        await engine.loaded()


async def test_who_is_cancelled_in_a_call_to_the_engine_ends() -> None:
    """As the reconcile loop, for which the server's end waits: after an error it would go on."""
    ending, asked = Ending(), asyncio.Event()

    async def rpc(*_: object, **__: object) -> list[dict[str, Any]]:
        asked.set()
        await asyncio.sleep(BOUND_S * 2)
        return []

    engine = engine_of(rpc, ending)
    ended = asyncio.Event()
    async with ending.watched(lambda: True, ended.set):
        await asyncio.wait_for(ended.wait(), BOUND_S)
        ending.begin()
        looking = asyncio.create_task(engine.loaded())
        await asyncio.wait_for(asked.wait(), BOUND_S)
        looking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await looking


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(fit=True)


@pytest.fixture
async def running(
    endpoint: Endpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """The plugin's routes of a server."""
    monkeypatch.setenv("LORA_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("LORA_FS_MODEL", "tiny")
    app = FastAPI()
    endpoint.attach_router(app)
    ready = Readiness(False, ("EngineUnavailable: it is dead",))
    endpoint._late.replica = SimpleNamespace(readiness=lambda: ready, namespaces=("default",), model="tiny")  # type: ignore[assignment]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        yield http


@pytest.fixture
async def server(endpoint: Endpoint, running: httpx.AsyncClient) -> httpx.AsyncClient:
    """One that has begun to end."""
    endpoint._ending.begin()
    return running


async def test_what_reads_tells_how_it_ends(server: httpx.AsyncClient) -> None:
    """The conditions, the series and the dashboard, for good where vLLM stays up without its engine."""
    readyz = await server.get("/readyz")
    assert (readyz.status_code, readyz.json()["conditions"]) == (503, ["EngineUnavailable: it is dead"])
    for path in ("/metrics", "/"):
        assert (await server.get(path)).status_code == 200


async def test_refused_calls_are_counted(running: httpx.AsyncClient) -> None:
    """`/metrics` counts a call that another site's page sent, as a sidecar's does."""
    body, headers = {"lora_name": "a"}, {"Origin": "http://elsewhere"}
    refused = await running.post("/v1/unload_lora_adapter", json=body, headers=headers)
    assert refused.status_code == 403
    assert "lora_fs_refused_calls_total 1.0" in (await running.get("/metrics")).text


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("POST", "/v1/lora_adapters", {}),
        ("POST", "/v1/loras", {"lora_name": "a", "source": {"uri": "/a"}}),
        ("DELETE", "/v1/loras/a", {}),
    ],
)
async def test_what_acts_is_told_to_ask_another(
    server: httpx.AsyncClient, method: str, path: str, body: dict[str, object]
) -> None:
    """It could wait for a volume or an engine that does not answer."""
    answer = await server.request(method, path, json=body)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "this server ends" in answer.text


async def test_a_request_that_comes_while_the_engine_drains() -> None:
    """Is told so, whatever it asks for; one that came before goes on to its end."""
    site, ends, comes = Site(), asyncio.Event(), asyncio.Event()
    answers = site.gate._app

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        comes.set()
        await ends.wait()
        await answers(scope, receive, send)

    site.gate._app = app
    async with site.http:
        before = asyncio.create_task(site.http.post("/v1/completions", json={"model": "sql"}))
        await asyncio.wait_for(comes.wait(), BOUND_S)
        site.engine.ends = True
        for body in ({"model": "sql"}, {"model": "tiny"}, {}):
            answer = await site.http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "this server ends" in answer.json()["error"]["message"]
        ends.set()
        assert (await asyncio.wait_for(before, BOUND_S)).json()["asked"] == "sql"


async def dead(scope: Scope, receive: Receive, send: Send) -> None:
    """As vLLM answers what its engine's end cut."""
    told = create_error_response(EngineDeadError())
    await JSONResponse(told.model_dump(), told.error.code)(scope, receive, send)


async def failing(scope: Scope, receive: Receive, send: Send) -> None:
    """As vLLM answers what it fails for another reason."""
    told = create_error_response(EngineGenerateError("an error of one request"))
    await JSONResponse(told.model_dump(), told.error.code)(scope, receive, send)


async def shut(*_: object) -> None:
    """As vLLM's threads for prompts fail, which end first. It answers outside of the gate."""
    raise RuntimeError("cannot schedule new futures after shutdown")


async def torn_down(*_: object) -> None:
    """As where vLLM's own end fails, and the loop is torn down."""
    raise asyncio.CancelledError


@pytest.mark.parametrize("model", ["sql", "tiny"])
@pytest.mark.parametrize("app", [dead, shut, torn_down])
async def test_a_request_that_the_engines_end_cuts(app: ASGIApp, model: str) -> None:
    """It gets 503, as a later request does: it had passed the gate, and vLLM did not wait for it."""
    site = Site()

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        site.engine.ends = True
        await app(scope, receive, send)

    site.gate._app = cut
    async with site.http:
        answer = await site.http.post("/v1/completions", json={"model": model})
        site.engine.ends = False
        said = await site.http.post("/v1/messages", json={"model": model})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == TOLD
    assert (said.status_code, said.json()["type"], said.json()["error"]["message"]) == (503, "error", TOLD)
    assert site.replica.answers == ([("v1", 503)] * 2 if model == "sql" else [])


@pytest.mark.parametrize("model", ["sql", "tiny"])
async def test_an_answer_that_has_begun_stays_cut(model: str) -> None:
    """When the engine ends in the middle of it: the server closes the connection."""
    site, wire = Site(), Wire(model)

    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        site.engine.ends = True
        await shut()

    site.gate._app = cut
    with pytest.raises(RuntimeError, match="after shutdown"):
        await wire.ask(site.gate)
    assert [message["type"] for message in wire.got] == ["http.response.start"]


@pytest.mark.parametrize("model", ["sql", "tiny"])
async def test_an_engine_that_does_not_end(model: str) -> None:
    """Where nobody stopped the engine, vLLM's own error passes; only the engine's death becomes 503."""
    site = Site()
    site.gate._app = failing
    async with site.http:
        answer = await site.http.post("/v1/completions", json={"model": model})
        site.gate._app = shut
        with pytest.raises(RuntimeError, match="after shutdown"):
            await site.http.post("/v1/completions", json={"model": model})
        site.gate._app = dead
        died = await site.http.post("/v1/completions", json={"model": model})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, 500)
    assert (died.status_code, "the engine ended" in died.json()["error"]["message"]) == (503, True)


def test_vllms_drain_is_seen_before_its_engine_is_told() -> None:
    """By vLLM's own code: as soon as an engine may refuse requests, the gate refuses them."""
    seen = []
    core: Any = MPClient.__new__(MPClient)
    core._finalizer = weakref.finalize(core, lambda: None)
    api = test_engine.Site().server("pod")
    assert not api.ends
    api._client.engine_core = core
    assert not api.ends

    class Resources:
        engine_manager = SimpleNamespace(shutdown=lambda timeout: seen.append(api.ends))

        def __call__(self) -> None:
            seen.append(api.ends)

    core.resources = Resources()
    core.shutdown(timeout=90)
    assert seen == [True, True]


async def test_an_answer_that_has_begun() -> None:
    """Goes on to its end; one of the same routes that has not is ended."""
    ending, ends = Ending(), asyncio.Event()
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200})
        await ends.wait()
        await send({"type": "http.response.body"})

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    async def ask(path: str) -> None:
        await ending.bounds(app)({"path": path}, receive, send)

    begun, waiting = asyncio.create_task(ask("/begun")), asyncio.create_task(ask("/waiting"))
    await asyncio.sleep(0.05)
    ending.begin()
    with pytest.raises(EngineUnavailable):
        await asyncio.wait_for(waiting, BOUND_S)
    ends.set()
    await asyncio.wait_for(begun, BOUND_S)
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


async def test_the_end_is_seen() -> None:
    """Once, and soon; it is not looked for after the context."""
    ending, seen = Ending(), asyncio.Event()
    state = {"ends": False}
    async with ending.watched(lambda: state["ends"], seen.set):
        state["ends"] = True
        await asyncio.wait_for(seen.wait(), BOUND_S)
    seen.clear()
    state["ends"] = False
    async with ending.watched(lambda: state["ends"], seen.set):
        pass
    state["ends"] = True
    await asyncio.sleep(0.3)
    assert not seen.is_set()


def test_its_events_are_told() -> None:
    """Of its beginning and its end, as all that the plugin logs, on the page of the log."""
    code = "".join(path.read_text() for path in (ROOT / "worker_patch").rglob("*.py"))
    page = (ROOT / "docs/howto/observe.md").read_text()
    logged = set(re.findall(r'\bevent\("([^"]+)"', code))
    assert {"plugin.begins", "plugin.ends"} <= logged
    assert not [name for name in logged if f"| `{name}` |" not in page]


async def test_another_timeout_is_no_end() -> None:
    """As one of a volume that hangs: it keeps its own error."""
    with pytest.raises(TimeoutError, match="the volume"):
        async with Ending().waiting():
            raise TimeoutError("the volume")


@pytest.mark.parametrize(("ends", "answers"), [(True, False), (True, True), (False, False)])
async def test_a_loop_that_is_torn_down(ends: bool, answers: bool) -> None:
    """A waiting request fails when the server ends, unless its answer has begun or the server goes on."""
    ending, waits, ended = Ending(), asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        async with ending.waiting() as begun:
            if answers:
                begun()
            waits.set()
            await asyncio.sleep(BOUND_S)

    async with ending.watched(ended.is_set, ending.begin):
        waiting = asyncio.create_task(wait())
        await waits.wait()
        if ends:
            ended.set()
        waiting.cancel()  # before the watcher looks again
        with pytest.raises(EngineUnavailable if ends and not answers else asyncio.CancelledError):
            await waiting
