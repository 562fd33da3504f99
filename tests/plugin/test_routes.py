"""vLLM's own application with the plugin in it: which of its routes can change what is served."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from fastapi import FastAPI
from starlette.routing import Route
from starlette.testclient import TestClient
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.app import build_app
from vllm.tasks import SupportedTask
from vllm.utils.argparse_utils import FlexibleArgumentParser

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.paths import INFERENCE, NOT_FORWARDED
from lora_fs.worker_patch.compat import NAME
from tests.server.conftest import FakeReplica

# A body that every route which loads or unloads understands: vLLM's, SageMaker's, Dynamo's.
ASKS = {
    "lora_name": "x",
    "lora_path": "/etc",
    "name": "x",
    "src": "/etc",
    "source": {"uri": "file:///etc"},
    "model": "x",
    "lora_int_id": 1,
}
SPELLINGS = ("{}", "{}/", "/{}", "{}//", "/%2e{}", "/x/..{}", "{}?x=1")
CHANGES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters", "/adapters/x")
METHODS = ("POST", "PUT", "PATCH", "DELETE")


class Serving:
    """In place of vLLM's ``OpenAIServingModels``: tells what would have been changed."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    async def load_lora_adapter(self, *_: object, **__: object) -> str:
        self.changed.append("load")
        return "Success"

    async def unload_lora_adapter(self, *_: object, **__: object) -> str:
        self.changed.append("unload")
        return "Success"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """vLLM's application raises the level of every handler, pytest's too: that ends with the test."""
    root = logging.getLogger()
    loggers = {one: one.level for one in (root, logging.getLogger("lora_fs"))}
    handlers = {one: one.level for one in root.handlers}
    yield
    for logger, level in loggers.items():
        logger.setLevel(level)
    for handler, level in handlers.items():
        handler.setLevel(level)


@pytest.fixture(params=["0", "True"])
def updating(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both values of vLLM's variable."""
    value: str = request.param
    (tmp_path / "tokens").write_text("secret\n")
    handlers = "model_hosting_container_standards.common.handler.registry.handler_registry._handlers"
    monkeypatch.setattr(handlers, {})  # one a process
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", value)
    monkeypatch.setenv("LORA_FS_ROOT", str(tmp_path))
    monkeypatch.setenv("LORA_FS_TOKEN_FILE", str(tmp_path / "tokens"))
    return value


def built(monkeypatch: pytest.MonkeyPatch, plugins: str, kinds: Sequence[str] = ("generate",)) -> FastAPI:
    """As ``vllm serve`` makes it, before the engine is there. ``kinds``: what its model can do."""
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    parser = make_arg_parser(FlexibleArgumentParser())
    app: FastAPI = build_app(parser.parse_args(["--model", "tiny", "--enable-lora"]), tuple(kinds), None)
    app.state.openai_serving_models = Serving()
    app.state.log_stats = False
    return app


@pytest.mark.filterwarnings("ignore:Duplicate Operation ID")  # vLLM has its two LoRA routes twice
def test_every_route_of_an_engines_openapi_is_known(updating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its model can do, development's routes included: a sidecar answers it, passes it on, or leaves
    it to the engine's own port."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    theirs = built(monkeypatch, "", get_args(SupportedTask)).openapi()["paths"].keys()
    sidecar = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None))
    known = {*INFERENCE, *NOT_FORWARDED, *sidecar.openapi()["paths"]}
    assert {"/v1/completions", "/tokenize", "/v1/audio/transcriptions", "/collective_rpc"} <= theirs
    assert {path for path in theirs - known if not path.startswith("/v1/")} == set()


@pytest.fixture
def patched(updating: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """The running application with the plugin."""
    with TestClient(built(monkeypatch, NAME), raise_server_exceptions=False) as client:
        yield client


def changes(client: TestClient, method: str, path: str) -> Any:
    """Ask, and say what it changed."""
    app: Any = client.app
    serving = app.state.openai_serving_models = Serving()
    client.request(method, path, json=ASKS)
    return serving.changed


def test_stock_vllm_changes_adapters_on_these_routes(updating: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the plugin: so the other tests of this file would see it."""
    with TestClient(built(monkeypatch, ""), raise_server_exceptions=False) as client:
        seen = [changes(client, "DELETE" if path == "/adapters/x" else "POST", path) for path in CHANGES]
    expected = [["load"], ["unload"], ["load"], ["unload"]] if updating == "True" else [[], [], [], []]
    assert seen == expected


def test_no_route_changes_adapters_past_the_registry(patched: TestClient) -> None:
    """Whatever the running application answers, by whatever method."""
    app: Any = patched.app
    asked = 0
    for route in app.routes:
        if isinstance(route, Route):
            path = route.path.replace(":path", "").replace("{", "").replace("}", "")
            for method in (route.methods or set()) - {"HEAD"}:
                assert changes(patched, method, path) == [], (method, path)
                asked += 1
    assert asked > 30


def test_completions_stand_no_later_than_in_stock(
    patched: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request is compared with all routes before its own, twice."""
    apps: list[Any] = [patched.app, built(monkeypatch, "")]
    for path in ("/v1/completions", "/v1/chat/completions"):
        ours, stock = ([route.path for route in app.routes].index(path) for app in apps)
        assert ours <= stock, path


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_a_route_changes_adapters(patched: TestClient, spelling: str) -> None:
    """Slashes, escapes and dots; nor does the case of a letter."""
    for path in CHANGES:
        for written in (path, path.upper(), path.replace("a", "%61"), path.replace("o", "%6f")):
            for method in METHODS:
                assert changes(patched, method, spelling.format(written)) == [], (method, written)
