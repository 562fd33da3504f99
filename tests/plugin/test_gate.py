"""The gate alone, before an application that says what it was given."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.anthropic.protocol import AnthropicErrorResponse
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.errors import (
    EngineRejected,
    EngineUnavailable,
    InvalidAdapter,
    VolumeUnavailable,
    WaitTimeout,
)
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.worker_patch.api import asks
from lora_fs.worker_patch.api.asked import Requests, asked
from lora_fs.worker_patch.api.gate import Behind, Gate
from tests.observability.test_tracing import spans
from tests.reconcile.test_plan import RECORD
from tests.server.at_once import at_once

__all__ = ["spans"]  # a fixture

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


MOST = 1_000_000  # bytes of a body
OPEN = Admin(None)


class FakeReplica:
    """Serves ``known`` under the engine's names it is given; may fail."""

    def __init__(self) -> None:
        self.known = {"sql": "sql", "sql@v2": "sql@v2"}
        self.holding: list[str] = []
        self.forgotten: list[str] = []
        self.error: Exception | None = None
        self.users: list[str | None] = []
        self.answers: list[tuple[str, int]] = []
        self.tried = "sql@v2"
        self.read = True
        self.record = RECORD

    def lookup(self, name: str) -> Served | None:
        if name not in self.known:
            return None
        revision = name.partition("@")[2] or self.record.revision
        return Served(name, self.record.model_copy(update={"revision": revision}))

    def passes_through(self, name: str) -> bool:
        return name in ("tiny", "static")

    def check_read(self) -> None:
        if not self.read:
            raise VolumeUnavailable("the registry has not been read yet")

    def choose(self, served: Served, user: str | None) -> Served:
        self.users.append(user)
        return (
            Served(self.tried, RECORD.model_copy(update={"revision": "v2"})) if user == "tester" else served
        )

    def answered(self, served: Served, status: int) -> None:
        self.answers.append((served.record.revision, status))

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        if self.error is not None:
            raise self.error
        self.holding.append(name)
        try:
            yield self.known[name]
        finally:
            self.holding.remove(name)

    def forget(self, engine_name: str) -> None:
        self.forgotten.append(engine_name)


class FakeEngine:
    """Holds what it is asked to, except the first ``misses`` times."""

    def __init__(self) -> None:
        paths = {"sql": "/stage/d1/sql", "sql@v2": "/stage/d2/sql"}
        self.requests = {name: LoRARequest(name, 7, path) for name, path in paths.items()}
        self.misses, self.in_use, self.served = 0, 0, 0
        self.ends = False
        self.static = {"static": LoRARequest("static", 1, "/static")}
        self.lost = ""  # why a worker runs adapters without their weights

    def of_vllm(self, name: str | None) -> LoRARequest | None:
        return self.static.get(name or "")

    @contextmanager
    def serving(self) -> Iterator[None]:
        self.served += 1
        yield

    def using(self, request: LoRARequest) -> Any:
        class Use:
            def __enter__(use) -> None:
                self.in_use += 1

            def __exit__(use, *_: object) -> None:
                self.in_use -= 1

        return Use()

    @asynccontextmanager
    async def answering(self, request: LoRARequest) -> AsyncIterator[None]:
        yield
        if self.lost:
            raise EngineUnavailable(f"a worker of the engine lost {request.lora_name}: {self.lost}")

    async def hold(self, request: LoRARequest) -> bool:
        self.misses -= 1
        return self.misses < 0


class Site:
    """The gate, what is behind it, and what the application saw."""

    def __init__(self, admin: Admin = OPEN, root_path: str = "") -> None:
        self.replica, self.engine = FakeReplica(), FakeEngine()
        self.requests = Requests({})
        self.started, self.aborts = True, False
        behind: Any = Behind(self.replica, self.engine, 5.0, admin)  # type: ignore[arg-type]
        self.gate = Gate(self.app, lambda: behind if self.started else None, MOST)
        transport = httpx.ASGITransport(app=self.gate, root_path=root_path)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://engine")

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        now, model = asked.get(), None
        with suppress(ValueError, AttributeError, RecursionError):  # vLLM answers 400 to these
            model = json.loads(body).get("model")
        answer: dict[str, Any] = {
            "body": body.decode("latin-1"),
            "asked": now and now.name,
            "found": isinstance(model, str) and model in self.requests,
            "holding": list(self.replica.holding),
            "in_use": self.engine.in_use,
        }
        if self.aborts:
            answer["choices"] = [{"text": "cut o", "finish_reason": "abort"}]
        await JSONResponse(answer)(scope, receive, send)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    async with site.http:
        yield site


async def test_an_adapter_is_held_while_the_answer_is_made(site: Site) -> None:
    answer = await site.http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    told = answer.json()
    assert (told["asked"], told["found"], told["holding"], told["in_use"]) == ("sql", True, ["sql"], 1)
    assert answer.headers["x-lora-fs-adapter"] == "default/tiny/v1/a1"
    assert (site.replica.holding, site.engine.in_use, asked.get()) == ([], 0, None)


async def test_the_wait_for_an_adapter_is_a_part_of_its_senders_trace(
    site: Site, spans: InMemorySpanExporter
) -> None:
    """So the copy and the load are, which it begins. A request of the base model waits for nothing."""
    sender = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    for model in ("sql", "tiny"):
        await site.http.post("/v1/completions", json={"model": model}, headers=sender)
    (hold,) = spans.get_finished_spans()
    assert (hold.name, dict(hold.attributes or {})) == ("hold", {"lora_fs.adapter": "default/tiny/v1/a1"})
    assert hold.parent is not None
    assert f"{hold.parent.span_id:016x}" in sender["traceparent"]


async def test_after_a_retry_the_header_names_what_answered(site: Site) -> None:
    """The name may have come to serve another revision meanwhile."""
    site.engine.misses = 1
    forget = site.replica.forget

    def moved(engine_name: str) -> None:
        forget(engine_name)
        site.replica.record = RECORD.model_copy(update={"revision": "v2"})

    site.replica.forget = moved  # type: ignore[method-assign]
    answer = await site.http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert (site.replica.forgotten, answer.headers["x-lora-fs-revision"]) == (["sql"], "v2")


async def test_an_adapter_that_ran_blank_while_it_was_asked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request has the name of after the blank run: see ``calls.request_for``."""
    renamed, answered = LoRARequest("sql@1f0c22ab34ef", 7, "/stage/d1/sql"), list[LoRARequest]()

    async def hold(request: LoRARequest) -> bool:
        site.engine.requests["sql"] = renamed
        return True

    @asynccontextmanager
    async def answering(request: LoRARequest) -> AsyncIterator[None]:
        answered.append(request)
        yield

    monkeypatch.setattr(site.engine, "hold", hold)
    monkeypatch.setattr(site.engine, "answering", answering)
    await site.http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
    assert answered == [renamed]


async def test_an_answer_that_is_to_be_fetched_later(site: Site) -> None:
    """Its adapter could leave before it is made."""
    later = {"model": "sql", "input": "x", "background": True}
    answer = await site.http.post("/v1/responses", json=later)
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]
    assert (await site.http.post("/v1/responses", json={**later, "model": "tiny"})).status_code == 200


@pytest.mark.parametrize("model", ["sql", "tiny"])
async def test_an_answer_that_vllm_aborts(site: Site, model: str) -> None:
    """It is 503 and counted as that: vLLM says 200, with a text that is cut off."""
    site.aborts = True
    answer = await site.http.post("/v1/completions", json={"model": model, "prompt": "x"})
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert site.replica.answers == ([("v1", 503)] if model == "sql" else [])


@pytest.mark.parametrize(
    "flag", [True, 1, 1.0, "true", "True", "yes", "on", "1", "t", "y", 2, "maybe", [], {}]
)
async def test_whatever_vllm_may_take_for_yes(site: Site, flag: object) -> None:
    """Its pydantic is lenient with flags; in every encoding that it reads."""
    body = json.dumps({"model": "sql", "input": "x", "background": flag})
    for sent in (body.encode(), body.encode("utf-16")):
        assert (await site.http.post("/v1/responses", content=sent)).status_code == 400


@pytest.mark.parametrize("flag", [None, False, 0, 0.0, "false", "no", "off", "0"])
async def test_what_it_takes_for_no(site: Site, flag: object) -> None:
    answer = await site.http.post("/v1/responses", json={"model": "sql", "background": flag})
    assert answer.json()["asked"] == "sql"


async def test_the_body_arrives_as_it_was_sent(site: Site) -> None:
    body = b'{"model":"sql", "prompt": "' + b"x" * 300_000 + b'"}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 65_536):
            yield body[start : start + 65_536]

    answer = await site.http.post("/v1/completions", content=pieces())
    assert answer.json()["body"].encode() == body


@pytest.mark.parametrize(
    "body", [b'{"model":"tiny"}', b'{"prompt":"x"}', b'{"model":3}', b"{", b"", b"[]", b'{"model":"../x"}']
)
async def test_other_requests_pass_untouched(site: Site, body: bytes) -> None:
    """A base model, an unknown name, and what is no request at all: vLLM answers those."""
    told = (await site.http.post("/v1/completions", content=body)).json()
    assert (told["body"].encode(), told["asked"], told["found"], told["holding"]) == (body, None, False, [])


async def test_a_body_that_nests_deeply(site: Site) -> None:
    """Its adapter is held, and vLLM says whether its own parser goes as deep."""
    body = b'{"x":' + b"[" * 5_000 + b"]" * 5_000 + b',"model":"sql"}'
    told = (await site.http.post("/v1/completions", content=body)).json()
    assert (told["body"].encode(), told["holding"]) == (body, ["sql"])


@pytest.mark.parametrize(
    "body", [b'{"model":"\xff"}', b'{"model":"\\ud800"}'], ids=["no text", "half a surrogate"]
)
def test_what_nobody_can_read(body: bytes) -> None:
    """It names no adapter, and is no traceback: vLLM says what is wrong with it."""
    scope = {"type": "http", "path": "/", "headers": []}
    assert at_once(asks.read(scope, body)).model in (None, "\ud800")


@pytest.mark.parametrize(
    "body",
    [
        '{"model": "sql", "prompt": "hello"}'.encode("utf-8-sig"),
        '{"model": "sql", "prompt": "hello"}'.encode("utf-16"),
        b'{"model": "sql", "prompt": "hello", "temperature": NaN}',
    ],
    ids=["byte order mark", "utf-16", "nan"],
)
async def test_whatever_vllm_reads_names_its_model(site: Site, body: bytes) -> None:
    """Passed by as unreadable it would be answered that the model does not exist."""
    answer = await site.http.post("/v1/completions", content=body)
    assert (answer.json()["asked"], answer.json()["holding"]) == ("sql", ["sql"])


async def test_a_form_names_its_model(site: Site) -> None:
    files: Any = {"file": ("a.wav", b"RIFF"), "model": (None, "sql@v2")}
    answer = await site.http.post("/v1/audio/transcriptions", files=files)
    assert answer.json()["asked"] == "sql@v2"


async def test_its_own_calls_are_no_requests(site: Site) -> None:
    answer = await site.http.post("/v1/load_lora_adapter", json={"model": "sql"})
    assert answer.json()["asked"] is None


async def test_before_the_server_is_ready(site: Site) -> None:
    site.started = False
    assert (await site.http.post("/v1/completions", json={"model": "sql"})).json()["asked"] is None


async def test_an_adapter_evicted_meanwhile_is_loaded_again(site: Site) -> None:
    site.engine.misses = 1
    assert (await site.http.post("/v1/completions", json={"model": "sql"})).json()["asked"] == "sql"
    assert site.replica.forgotten == ["sql"]


async def test_an_adapter_that_will_not_stay(site: Site) -> None:
    """Asked for twice, then a 503 that says when to come back."""
    site.engine.misses = 2
    answer = await site.http.post("/v1/completions", json={"model": "sql"})
    assert answer.status_code == 503
    assert "evicted" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
    assert site.replica.holding == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineRejected("the engine cannot load sql: rank 64", reason="rank 64"), 400),
        (InvalidAdapter("sql", []), 400),
        (WaitTimeout("sql is still loading after 5 s"), 503),
    ],
)
async def test_what_keeps_it_from_being_served_is_told(site: Site, error: Exception, status: int) -> None:
    site.replica.error = error
    answer = await site.http.post("/v1/completions", json={"model": "sql"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)


async def test_answers_are_counted_by_what_was_chosen(site: Site) -> None:
    """vLLM's answers and the gate's own errors count for the revision that was chosen."""
    await site.http.post("/v1/completions", json={"model": "sql", "user": "tester"})
    await site.http.post("/v1/completions", json={"model": "tiny"})
    site.replica.error = WaitTimeout("sql is still loading after 5 s")
    await site.http.post("/v1/completions", json={"model": "sql"})
    assert site.replica.answers == [("v2", 200), ("v1", 503)]


@pytest.mark.parametrize(("model", "held"), [("sql", 1), ("static", 0)])
async def test_an_answer_without_its_adapters_weights(site: Site, model: str, held: int) -> None:
    """It ends, also that of an adapter that vLLM was started with, whose weights a step brings back."""
    site.engine.lost, site.gate._app = "no memory", lambda *_: asyncio.sleep(0)
    answer = await site.http.post("/v1/completions", json={"model": model})
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == f"a worker of the engine lost {model}: no memory"
    assert (-site.engine.misses, site.engine.in_use) == (held, 0)


def test_names_that_vllm_was_started_with_stay() -> None:
    static: MutableMapping[str, LoRARequest] = {"old": LoRARequest("old", 1, "/old")}
    requests = Requests(static)
    assert "old" in requests
    assert "sql" not in requests
    requests["new"] = LoRARequest("new", 2, "/new")
    assert (len(requests), list(requests)) == (2, ["old", "new"])
    del requests["old"]
    assert list(static) == ["new"]


@pytest.mark.parametrize("headers", [{}, {"x-lora-fs-token": "none"}, {"authorization": "Bearer none"}])
@pytest.mark.parametrize("tokens", ["one-4711\n", "no token file ::\n"], ids=["a token file", "a broken one"])
async def test_no_answer_tells_of_a_hidden_name(tmp_path: Path, tokens: str, headers: dict[str, str]) -> None:
    """Whatever is shown for a token, a name that is there and one that is not are answered alike."""
    (tmp_path / "tokens").write_text(tokens)
    site, told = Site(Admin(tmp_path / "tokens", ("-",))), []
    async with site.http as http:
        for name in ("sql", "sqx", "sql@v2", "sqx@v2"):
            answer = await http.post("/v1/completions", json={"model": name}, headers=headers)
            told.append((answer.status_code, answer.text.replace("sqx", "sql").replace("@v2", "")))
        assert len(set(told)) == 1
        assert told[0][0] in (200, 401, 503)  # 200 is of the application, which stands for vLLM's 404
        assert site.replica.holding == []
        for own in ("tiny", "", None):  # the engine's own: they pass, as ever
            answer = await http.post("/v1/completions", json={"model": own}, headers=headers)
            assert (answer.status_code, answer.json()["asked"]) == (200, None)


async def test_before_the_registry_was_read(site: Site) -> None:
    """No name is unknown yet, but the engine's own are known; what is known already is served."""
    site.replica.read = False
    answer = await site.http.post("/v1/completions", json={"model": "other"})
    assert (answer.status_code, "not been read" in answer.text) == (503, True)
    assert answer.headers["retry-after"]
    for name, seen in (("tiny", None), (None, None), ("sql", "sql")):
        answer = await site.http.post("/v1/completions", json={"model": name})
        assert (answer.status_code, answer.json()["asked"]) == (200, seen)


@pytest.mark.parametrize(
    ("root_path", "path"),
    [("", "/v1/lora_adapters"), ("/llm", "/llm/v1/lora_adapters"), ("/llm", "/v1/lora_adapters")],
)
async def test_its_own_calls_are_not_read(root_path: str, path: str) -> None:
    """An upload is its route's to read, which asks for a token first; below ``--root-path``, too."""
    site, taken = Site(root_path=root_path), 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse(taken)(scope, receive, send)

    async def upload() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(64):
            taken += 1
            yield b"x" * 1000

    site.gate._app = app
    async with site.http as http:
        answer = await http.post(path, content=upload())
    assert (answer.status_code, answer.json()) == (200, 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions"])
async def test_a_body_over_the_bound(site: Site, path: str) -> None:
    """As the sidecar answers it; no more of it is taken, whatever it names."""
    taken = 0

    async def long() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(40):
            taken += MOST // 4
            yield b" " * (MOST // 4)

    answer = await site.http.post(path, content=long())
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "InvalidUserInput")
    assert answer.json()["error"]["param"] is None
    assert taken <= 2 * MOST
    body = b" " * (MOST - 20) + b'{"model": "tiny"}'
    assert (await site.http.post(path, content=body)).status_code == 200


@pytest.mark.parametrize(
    ("headers", "seen"),
    [({"X-Amzn-SageMaker-Adapter-Identifier": "sql"}, "sql"), ({}, None), ({"x-other": "sql"}, None)],
)
async def test_sagemakers_header_is_the_model(site: Site, headers: dict[str, str], seen: str | None) -> None:
    """vLLM puts it in the body's place, and where it is not there nothing: that is its base model."""
    for model in ({"model": "tiny"}, {"model": "sql@v2"}, {"model": "nobody"}, {}):
        body = {**model, "prompt": "x"}
        answer = await site.http.post("/invocations", json=body, headers=headers)
        assert answer.json()["asked"] == seen
        assert ("x-lora-fs-adapter" in answer.headers) is (seen is not None)
        elsewhere = await site.http.post("/v1/completions", json={"model": "tiny"}, headers=headers)
        assert elsewhere.json()["asked"] is None


@pytest.mark.parametrize("model", [{}, {"model": "any"}, {"model": 3}], ids=["none", "another", "no name"])
async def test_sagemakers_body_says_the_rest(site: Site, model: dict[str, object]) -> None:
    """Whose request it is, and that its answer is to be fetched later, whatever model is in it."""
    headers = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}
    body = {**model, "prompt": "x", "user": "tester"}
    for sent in (json.dumps(body).encode(), json.dumps(body).encode("utf-16")):
        answer = await site.http.post("/invocations", content=sent, headers=headers)
        assert answer.headers["x-lora-fs-adapter"] == "default/tiny/v2/a1"  # the canary's
    assert site.replica.users == ["tester", "tester"]
    later = await site.http.post("/invocations", json={**body, "background": True}, headers=headers)
    assert (later.status_code, "background" in later.text) == (400, True)


def test_sagemakers_rule_is_vllms() -> None:
    """The rule above, of the decorator that vLLM's route has; in a process whose logging it may configure."""
    script = f"""
import asyncio
from model_hosting_container_standards.sagemaker import inject_adapter_id
from starlette.requests import Request

async def invocations(request):
    return (await request.json())["model"]

async def receive():
    return {{"type": "http.request", "body": b'{{"model": "other"}}'}}

for headers in ([({asks._ADAPTER.encode()!r}, b"sql")], []):
    scope = {{"type": "http", "method": "POST", "headers": headers, "query_string": b""}}
    print(asyncio.run(inject_adapter_id("model")(invocations)(Request(scope, receive))))
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.splitlines() == ["sql", "None"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_anthropics_errors(site: Site, path: str) -> None:
    """As vLLM's own have there."""
    site.replica.error = WaitTimeout("sql is still loading after 5 s")
    answer = await site.http.post(path, json={"model": "sql"})
    shape = AnthropicErrorResponse.model_validate(answer.json())
    assert shape.model_dump() == answer.json()
    assert (answer.status_code, shape.error.message) == (503, "sql is still loading after 5 s")
    assert (shape.type, shape.error.type) == ("error", "ServiceUnavailableError")
    assert answer.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/completions"])
async def test_a_stream_that_breaks_ends_as_its_route_has_it(site: Site, path: str) -> None:
    """Anthropic's clients skip an event without a name: a lost adapter's text looked whole to them."""

    async def begin(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})

    site.engine.lost, site.gate._app = "no memory", begin
    answer = await site.http.post(path, json={"model": "sql"})
    _, last, *rest = answer.text.split("\n\n")
    said, (*named, data) = "a worker of the engine lost sql: no memory", last.splitlines()
    event = json.loads(data.removeprefix("data: "))
    if path == "/v1/messages":
        assert (named, rest) == (["event: error"], [""])
        assert AnthropicErrorResponse.model_validate(event).error.message == said
    else:
        assert (named, rest) == ([], ["data: [DONE]", ""])
        assert event["error"]["message"] == said


class Wire:
    """A client by hand: it sends one body, and leaves when it is told to."""

    def __init__(self, model: str = "sql") -> None:
        self.sent = [json.dumps({"model": model}).encode()]
        self.left, self.listening = asyncio.Event(), 0
        self.got: list[Message] = []

    async def receive(self) -> Message:
        if self.sent:
            return {"type": "http.request", "body": self.sent.pop(), "more_body": False}
        self.listening += 1
        try:
            await self.left.wait()
        finally:
            self.listening -= 1
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.got.append(message)

    async def ask(self, gate: Gate) -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        await gate(scope, self.receive, self.send)


async def test_a_client_that_leaves_waits_no_longer(site: Site) -> None:
    """Its wait for the adapter ends, and nobody listens for it any more."""
    wire, waiting = Wire(), asyncio.Event()

    @asynccontextmanager
    async def hold(name: str, timeout_s: float) -> AsyncIterator[str]:
        waiting.set()
        await asyncio.Event().wait()
        yield name

    site.replica.hold = hold  # type: ignore[method-assign]
    asking = asyncio.create_task(wire.ask(site.gate))
    await waiting.wait()
    wire.left.set()
    await asyncio.wait_for(asking, 20)
    assert wire.got[0]["status"] == 499
    assert (wire.listening, site.engine.in_use, site.replica.holding) == (0, 0, [])


@pytest.mark.parametrize("slow", [False, True], ids=["resident", "loaded first"])
async def test_the_application_hears_of_it_afterwards(site: Site, slow: bool) -> None:
    """Who listened while the adapter was loaded hands on what it hears, once; or is not heard of."""
    wire, app_listens, heard = Wire(), asyncio.Event(), list[str]()

    @asynccontextmanager
    async def hold(name: str, timeout_s: float) -> AsyncIterator[str]:
        for _ in range(5 if slow else 0):
            await asyncio.sleep(0)
        assert wire.listening == slow
        yield name

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        heard.append((await receive())["type"])
        listener = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        listener.cancel()  # as at the end of a part of an answer
        await asyncio.gather(listener, return_exceptions=True)
        app_listens.set()
        heard.append((await receive())["type"])

    site.replica.hold, site.gate._app = hold, app  # type: ignore[method-assign]
    asking = asyncio.create_task(wire.ask(site.gate))
    await app_listens.wait()
    wire.left.set()
    await asyncio.wait_for(asking, 20)
    assert heard == ["http.request", "http.disconnect"]
    assert wire.listening == 0


async def test_a_timeout_of_the_load_is_its_own(site: Site) -> None:
    """It is not taken for a client that left."""
    site.replica.error = TimeoutError("a bug")
    with pytest.raises(TimeoutError, match="a bug"):
        await Wire().ask(site.gate)
