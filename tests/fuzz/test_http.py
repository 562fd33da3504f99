"""What /openapi.json promises is what the sidecar and the plugin's routes do, whatever they are sent.

schemathesis makes requests from the document itself, good and bad ones, the same in every run; a
real replica on a real folder answers them. What is checked: no 5xx, only statuses, content types and
bodies that the document names, and no path of this machine but those that the caller gave.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from starlette.exceptions import HTTPException
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.engine.protocol import Loaded
from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.middleware.errors import on_error
from lora_fs.sidecar.server.routes import dynamo, lora, models, observe
from lora_fs.sidecar.settings import load_settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine
from tests.registry.conftest import write_adapter
from tests.server.conftest import serving

EXAMPLES = 10
EXAMPLES_LONG = 2_000
CONFORMS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)


class Whole(FakeEngine):
    """Its base model has a card as vLLM's have one."""

    async def loaded(self) -> Loaded:
        found = await super().loaded()
        return replace(found, base_cards=tuple({**card, "created": 1} for card in found.base_cards))


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("volume")


def assembled(volume: Path, stage: Path) -> Assembly:
    """A replica with one adapter dropped and one to be registered."""
    write_adapter(volume / "default/tiny/v1/a1")
    write_adapter(volume / "sources/b1", seed=1)
    given = load_settings(
        root=volume,
        create=True,
        model="tiny",
        stage_dir=stage,
        settle_s=0.0,
        allowed_sources=(str(volume / "sources"),),
        replica_id="fuzzed",
    )
    return asyncio.run(assemble(given, Expectation(), Whole()))


class EnginePages(BaseHTTPRequestHandler):
    """An engine's own pages, each an empty object."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *told: object) -> None:
        pass


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """Where the engine answers over HTTP."""
    with ThreadingHTTPServer(("127.0.0.1", 0), EnginePages) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def sidecar_app(assembly: Assembly, engine_url: str) -> FastAPI:
    return create_app(
        assembly.replica,
        engine_url=engine_url,
        admin=Admin(None, insecure="loopback"),
        background=assembly.running,
    )


def plugin_app(assembly: Assembly, engine_url: str) -> FastAPI:
    """The routers that the plugin puts into vLLM's application, with its handler of errors and vLLM's."""
    app = FastAPI(lifespan=lambda _: assembly.running())
    app.state.args = Namespace(log_error_stack=False)
    replica, admin = assembly.replica, Admin(None, insecure="loopback")
    for router in (
        models.router(replica, admin),
        lora.router(replica, admin, Trail(None)),
        dynamo.router(replica, admin, Trail(None), hold_timeout_s=5.0),
        observe.discovery(replica, admin),
    ):
        app.router.routes.extend(router.routes)
    app.add_exception_handler(LoraFsError, on_error)
    app.add_exception_handler(RequestValidationError, validation_exception_handler)
    app.add_exception_handler(HTTPException, http_exception_handler)
    return app


@pytest.fixture(params=[sidecar_app, plugin_app], ids=["sidecar", "plugin"], scope="module")
def url(
    request: pytest.FixtureRequest,
    volume: Path,
    engine_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    assembly = assembled(volume, tmp_path_factory.mktemp("stage"))
    with serving(request.param(assembly, engine_url), assembly.replica) as at:
        yield at


def ask(url: str, volume: Path, examples: int) -> int:
    """Send each operation ``examples`` requests that fit the document and as many that do not."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [CHECKS.get_one(name) for name in CONFORMS]
    sent = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            try:
                strategy = operation.as_strategy(generation_mode=mode)
            except schemathesis.errors.SchemathesisError:
                continue

            @settings(
                max_examples=examples,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategy)
            def each(case: Any) -> None:
                nonlocal sent
                answer = case.call(timeout=10)
                case.validate_response(answer, checks=checks)
                if answer.status_code >= 400:
                    assert str(volume) not in answer.text
                sent += 1

            with suppress(Unsatisfiable):  # nothing can be wrong where nothing is asked
                each()
    return sent


def test_the_document_is_kept(url: str, volume: Path) -> None:
    """Every operation with good and bad parameters and bodies."""
    assert ask(url, volume, EXAMPLES) > EXAMPLES


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)  # it took over an hour on two busy cores
def test_the_document_is_kept_for_long(url: str, volume: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Many more of them."""
    caplog.set_level(logging.WARNING, logger="lora_fs.audit")  # a line a request
    print(f"{ask(url, volume, EXAMPLES_LONG)} requests")


@pytest.mark.parametrize(
    "model", ["\\ud800", "\\u0000", "\\u202e", "../../etc/passwd", "a1@..", "x" * 5_000], ids=range(6)
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/loras"]
)
def test_names_that_are_no_text(url: str, model: str, path: str) -> None:
    """JSON lets a string hold half a character, which no answer can repeat: it was a 500."""
    body = f'{{"model":"{model}","lora_name":"{model}","lora_path":"{model}","source":{{"uri":"{model}"}}}}'
    answer = httpx.post(url + path, content=body, headers={"content-type": "application/json"}, **LOCAL)
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize("url", [sidecar_app], indirect=True, ids=["sidecar"])
@pytest.mark.parametrize("act", ["register", "set"])
@pytest.mark.parametrize("field", ["labels", "base_model"])
def test_half_a_character_in_what_a_record_keeps(url: str, volume: Path, act: str, field: str) -> None:
    """The answer names the field, and nothing was copied: it quoted the record, and left a copy for a day."""
    scope = volume / "default/tiny"
    before = sorted(scope.rglob("*"))
    said = {"labels": {"a": "\ud800"}} if field == "labels" else {field: "\ud800"}
    source = {"source": str(volume / "sources/b1")} if act == "register" else {}
    answer = httpx.post(
        f"{url}/v1/lora_adapters/default/tiny/a1/{act}",
        content=json.dumps(source | said),
        headers={"content-type": "application/json"},
        **LOCAL,
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(field)
    assert sorted(scope.rglob("*")) == before


def test_a_path_that_is_a_loop(url: str, volume: Path) -> None:
    """A symlink to itself, where adapters may be registered from, is no folder."""
    loop = volume / "sources/loop"
    if not loop.is_symlink():
        loop.symlink_to("loop")
    answer = httpx.post(
        f"{url}/v1/load_lora_adapter", json={"lora_name": "a2", "lora_path": str(loop)}, **LOCAL
    )
    assert 400 <= answer.status_code < 500
