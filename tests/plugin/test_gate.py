"""The gate alone, before an application that says what it was given."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.errors import EngineRejected, WaitTimeout
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.server.auth import Admin
from lora_fs.worker_patch.api import gate
from lora_fs.worker_patch.api.asked import Requests, asked
from lora_fs.worker_patch.api.gate import Behind, Gate
from tests.reconcile.test_plan import RECORD

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeReplica:
    """Serves ``known`` under the engine's names it is given; may fail."""

    def __init__(self) -> None:
        self.known = {"sql": "sql", "sql@v2": "sql@v2"}
        self.holding: list[str] = []
        self.forgotten: list[str] = []
        self.error: Exception | None = None
        self.users: list[str | None] = []
        self.tried = "sql@v2"

    def lookup(self, name: str) -> Served | None:
        return Served(name, RECORD) if name in self.known else None

    def choose(self, served: Served, user: str | None) -> Served:
        self.users.append(user)
        return Served(self.tried, RECORD) if user == "tester" else served

    @asynccontextmanager
    async def hold(self, name: str, timeout_s: float) -> AsyncIterator[str]:
        if self.error is not None:
            raise self.error
        self.holding.append(name)
        yield self.known[name]
        self.holding.remove(name)

    def forget(self, engine_name: str) -> None:
        self.forgotten.append(engine_name)


class FakeEngine:
    """Holds what it is asked to, except the first ``misses`` times."""

    def __init__(self) -> None:
        paths = {"sql": "/stage/d1/sql", "sql@v2": "/stage/d2/sql"}
        self.requests = {name: LoRARequest(name, 7, path) for name, path in paths.items()}
        self.misses, self.in_use, self.served = 0, 0, 0

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

    async def hold(self, request: LoRARequest) -> bool:
        self.misses -= 1
        return self.misses < 0


class Site:
    """The gate, what is behind it, and what the application saw."""

    def __init__(self) -> None:
        self.replica, self.engine = FakeReplica(), FakeEngine()
        self.requests = Requests({})
        self.started = True
        behind: Any = Behind(self.replica, self.engine, 5.0, Admin(None))  # type: ignore[arg-type]
        gate = Gate(self.app, lambda: behind if self.started else None)
        transport = httpx.ASGITransport(app=gate)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://engine")

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        now, model = asked.get(), None
        with suppress(ValueError, AttributeError):
            model = json.loads(body).get("model")
        answer = {
            "body": body.decode("latin-1"),
            "asked": now and now.name,
            "found": isinstance(model, str) and model in self.requests,
            "holding": list(self.replica.holding),
            "in_use": self.engine.in_use,
        }
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
    assert answer.headers["x-lora-fs-adapter"] == "d1/sql"
    assert (site.replica.holding, site.engine.in_use, asked.get()) == ([], 0, None)


async def test_an_answer_that_is_to_be_fetched_later(site: Site) -> None:
    """Its adapter could leave before it is made."""
    later = {"model": "sql", "input": "x", "background": True}
    answer = await site.http.post("/v1/responses", json=later)
    assert answer.status_code == 400
    assert "background" in answer.json()["error"]["message"]
    for told in ({**later, "background": False}, {**later, "model": "tiny"}):
        assert (await site.http.post("/v1/responses", json=told)).status_code == 200


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


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"sql","x":' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
    ],
    ids=["deeper than any parser goes", "no text", "half a surrogate"],
)
def test_what_nobody_can_read(body: bytes) -> None:
    """It names no adapter, and is no traceback: vLLM says what is wrong with it."""
    assert gate._asked({"type": "http", "headers": []}, body).model in (None, "\ud800")


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
        (WaitTimeout("sql is still loading after 5 s"), 503),
    ],
)
async def test_what_keeps_it_from_being_served_is_told(site: Site, error: Exception, status: int) -> None:
    site.replica.error = error
    answer = await site.http.post("/v1/completions", json={"model": "sql"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)


def test_names_that_vllm_was_started_with_stay() -> None:
    static: MutableMapping[str, LoRARequest] = {"old": LoRARequest("old", 1, "/old")}
    requests = Requests(static)
    assert "old" in requests
    assert "sql" not in requests
    requests["new"] = LoRARequest("new", 2, "/new")
    assert (len(requests), list(requests)) == (2, ["old", "new"])
    del requests["old"]
    assert list(static) == ["new"]
