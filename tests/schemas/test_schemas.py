"""The schemas say what the types say, and hold for real files and real answers."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.model import ReplicaStatus, Scope
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.codec import seal, unseal
from lora_fs.sidecar.registry.operations import Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.auth import Admin
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.server.conftest import FakeReplica, serving

ROOT = Path(__file__).parents[2]
SCOPE = Scope("default", "tiny")


def holds(name: str, value: object) -> None:
    """Check a value against a schema; the schema itself is checked too."""
    schema = schemas.load(name)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(value)


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_schemas", ROOT / ".ci" / "generate_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_types_say(generator: ModuleType) -> None:
    """After a change of a type ``make schemas`` was run."""
    for name in schemas.names():
        assert (ROOT / "schemas" / f"{name}.json").read_text() == generator.render(name), name
    assert schemas.names() == sorted({**generator.STORED, **generator.API})


def test_every_file_of_a_registry(tmp_path: Path) -> None:
    """Marker, HEAD, records, tombstones and pointers as the registry writes them."""
    registry = Registry(tmp_path / "root", create=True)
    folder = write_adapter(tmp_path / "a1")
    wanted = Registration("a1", folder, folder.as_uri(), labels={"team": "x"})
    operations.register(registry, SCOPE, wanted, Expectation(), writer="test")
    operations.unregister(registry, SCOPE, "a1", writer="test")
    registry.close()
    scope = registry.layout.scope(SCOPE)
    found = {
        "marker": [registry.layout.marker],
        "head": [registry.layout.head],
        "record": sorted((scope / "v1").glob("*.json")),
        "pointer": sorted((scope / ".active").glob("*.json")),
    }
    assert [len(paths) for paths in found.values()] == [1, 1, 2, 2]
    for name, paths in found.items():
        for path in paths:
            holds(name, unseal(path.read_bytes()))


def test_a_status_file_of_another_version() -> None:
    """Fields this version does not know are no violation."""
    status = ReplicaStatus(replica="r", model="tiny", namespaces=("default",), future=[1])
    holds("replica-status", unseal(seal(status)))


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None))
    with serving(app) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", "model-list"),
        ("/v1/models/a1", "model-card"),
        ("/v1/lora_adapters", "lora-adapters"),
        ("/v1/list_lora_adapters", "list-lora-adapters"),
        ("/metadata", "metadata"),
        ("/readyz", "readiness"),
        ("/v1/models/nobody", "error"),
    ],
)
def test_every_answer(http: httpx.Client, path: str, name: str) -> None:
    """What the sidecar answers is what the schema promises, and not the empty object alone."""
    body = http.get(path).json()
    holds(name, body)
    assert not Draft202012Validator(schemas.load(name)).is_valid({})


@pytest.mark.parametrize("path", ["load", "unload"])
def test_bodies_the_schema_refuses_are_refused(http: httpx.Client, path: str) -> None:
    """A body without its name is invalid to both, and the answer is vLLM's error."""
    assert not Draft202012Validator(schemas.load(f"{path}-request")).is_valid({"lora_path": "/x"})
    answer = http.post(f"/v1/{path}_lora_adapter", json={"lora_path": "/x"})
    assert answer.status_code == 400
    holds("error", answer.json())


def test_openapi_names_every_route(http: httpx.Client) -> None:
    """Each route of the API is described with the shape of its answer."""
    paths = http.get("/openapi.json").json()["paths"]
    for path in ("/v1/models", "/v1/lora_adapters", "/metadata", "/readyz", "/v1/load_lora_adapter"):
        assert path in paths
    assert "ModelList" in json.dumps(paths["/v1/models"])
