"""The reference pages are what `make schemas` writes, and they tell of everything that is served."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
from fastapi.testclient import TestClient

from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.bodies import ErrorBody
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.ports import ReplicaPort
from tests.docs.blocks import ROOT


def generator() -> ModuleType:
    """``.ci/generate_reference.py``, imported."""
    spec = spec_from_file_location("generate_reference", ROOT / ".ci/generate_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


REFERENCE = generator()
ONE_WORD = ("Liveness",)


@pytest.mark.parametrize("name", REFERENCE.PAGES)
def test_the_page_is_current(name: str) -> None:
    """After a change of a schema or a route: `make schemas`."""
    assert (ROOT / "docs/reference" / name).read_text() == REFERENCE.PAGES[name]()


def test_every_value_of_the_chart_is_explained() -> None:
    """Each has what it may be, its default and its meaning."""
    text = REFERENCE.PAGES["chart-values.md"]()
    rows = re.findall(r"^\| `[\w.]+` \|.*$", text, re.MULTILINE)
    assert len(rows) > 60
    assert [row for row in rows if not all(cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])] == []


def test_every_route_has_its_section() -> None:
    """What OpenAPI tells, the page tells."""
    told = re.findall(r"^## ([A-Z]+ /\S*)$", (ROOT / "docs/reference/http.md").read_text(), re.MULTILINE)
    paths = REFERENCE.openapi()["paths"]
    assert told == [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


def test_every_route_says_what_it_is_for() -> None:
    """A summary that FastAPI made of a function's name is none."""
    for methods in REFERENCE.openapi()["paths"].values():
        for route in methods.values():
            assert route["summary"] != route["summary"].title() or route["summary"] in ONE_WORD, route[
                "summary"
            ]


def test_no_answer_is_told_that_is_never_given() -> None:
    """FastAPI's own 422 is none: what breaks a route's types is told as vLLM tells it."""
    assert "HTTPValidationError" not in REFERENCE.openapi()["components"]["schemas"]


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/load_lora_adapter"), ("GET", "/none"), ("PUT", "/health")]
)
def test_what_the_framework_refuses_is_told(method: str, path: str) -> None:
    """Its words are in the table of errors, and its body is of the one type."""
    replica = SimpleNamespace(model="", namespaces=(), replica_id="")
    app = create_app(cast("ReplicaPort", replica), engine_url="http://engine", admin=Admin(None))
    answer = TestClient(app).request(method, path, json={})
    error = ErrorBody.model_validate(answer.json(), extra="forbid").error
    rows = re.findall(r"^\| ([\d, ]+) \| `([^`]+)` \|", REFERENCE.PAGES["http.md"](), re.MULTILINE)
    assert (str(answer.status_code), error.type) in {
        (s, kind) for many, kind in rows for s in many.split(", ")
    }
