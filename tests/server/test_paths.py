"""Which paths reach the engine: no spelling of one gets past the sidecar's own routes."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.proxy.paths import INFERENCE, NOT_FORWARDED
from tests.server.conftest import FakeEngine, FakeReplica, serving


@pytest.fixture(scope="module")
def heard() -> FakeEngine:
    """The engine behind ``guarded``, for all tests of this module."""
    return FakeEngine()


@pytest.fixture(scope="module")
def sidecar(heard: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a sidecar whose admin calls need a token."""
    token = tmp_path_factory.mktemp("token") / "token"
    token.write_text("secret")
    with (
        serving(heard.app) as engine_url,
        serving(create_app(FakeReplica(), engine_url=engine_url, admin=Admin(token))) as url,
    ):
        yield url


@pytest.fixture
def engine(heard: FakeEngine) -> FakeEngine:
    """The engine, which has heard nothing yet."""
    heard.paths.clear()
    return heard


@pytest.fixture
def guarded(sidecar: str) -> Iterator[http.client.HTTPConnection]:
    """A connection to the sidecar; paths are sent as they are."""
    connection = http.client.HTTPConnection(urlsplit(sidecar).netloc, timeout=60)
    yield connection
    connection.close()


def ask(connection: http.client.HTTPConnection, method: str, path: str) -> int:
    """Ask ``path`` to load, in vLLM's words and SageMaker's; returns the status."""
    body = json.dumps({"lora_name": "x", "lora_path": "/etc", "name": "x", "src": "/etc"})
    connection.request(method, path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/x/../load_lora_adapter",
        "/v1/./load_lora_adapter",
        "/v1//load_lora_adapter",
        "/v1/%2e/load_lora_adapter",
        "/v1/x/%2e%2e/load_lora_adapter",
        "/v1/%252e%252e/metrics",
        "/v1/..%2fv1%2fload_lora_adapter",
        "/v1/load%5flora%5fadapter",
        "/v1/..\\load_lora_adapter",
        "/v1/%2e%2e/metrics",
        "/v1/unload_lora_adapter/",
    ],
)
def test_no_spelling_of_a_path_gets_past_the_token(
    guarded: http.client.HTTPConnection, engine: FakeEngine, path: str
) -> None:
    """Each is refused, and the engine hears nothing of it."""
    assert ask(guarded, "POST", path) in (307, 400, 401)
    assert engine.paths == []


@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT", "PATCH"])
@pytest.mark.parametrize(
    "path",
    [
        "/adapters",
        "/adapters/",
        "/adapters/a1",
        "/adapters/a1/",
        "//adapters/a1",
        "/Adapters/a1",
        "/%61dapters/a1",
        "/v1/../adapters/a1",
        "/v1/%2e%2e/adapters/a1",
        "/v1/..%2fadapters%2fa1",
        "/version/../adapters/a1",
    ],
)
def test_no_spelling_of_sagemakers_calls_reaches_the_engine(
    guarded: http.client.HTTPConnection, engine: FakeEngine, method: str, path: str
) -> None:
    """They ask for a token here, as vLLM's do, or are refused."""
    status = ask(guarded, method, path)
    assert status in (307, 400, 401, 404, 405)
    if (method, path) in (("POST", "/adapters"), ("DELETE", "/adapters/a1")):
        assert status == 401
    assert engine.paths == []


def test_a_path_with_escapes_is_passed_on_as_it_came(
    guarded: http.client.HTTPConnection, engine: FakeEngine
) -> None:
    """What is escaped stays escaped, query included."""
    guarded.request("GET", "/v1/responses/a%20b?after=x%2Fy")
    guarded.getresponse().read()
    assert engine.paths == [b"/v1/responses/a%20b?after=x%2Fy"]


def test_every_route_that_vllm_declares_is_known() -> None:
    """Whatever the model's task: each is forwarded, or the operator's at the engine's port.

    Which routes an engine has depends on its model and its flags; its source has them all.
    """
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "entrypoints"
    declared = re.compile(r'@?\w*(?:router|app)\.(?:get|post|put|delete|api_route)\(\s*"(/[^"]*)"')
    found = {path for file in folder.rglob("*.py") for path in declared.findall(file.read_text())}
    assert {"/v2/embed", "/generative_scoring", "/cohere/v2/chat", "/inference/v1/generate"} <= found
    others = {path for path in found if not path.startswith("/v1/")}
    assert others - {*INFERENCE, *NOT_FORWARDED, "/docs"} == set()
