"""The schemas hold for what the sidecar really answers, and /openapi.json says the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, NotFound
from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.reconcile.catalog import Catalog, Served
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from tests.reconcile.test_plan import RECORD
from tests.server.conftest import FakeReplica, serving


def holds(name: str, value: object) -> None:
    """Check a value against a schema."""
    Draft202012Validator(schemas.load(name)).validate(value)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    app = create_app(FakeReplica(), engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url, httpx.Client(base_url=url, **LOCAL) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/models", "model-list"),
        ("/v1/models/a1", "model-card"),
        ("/v1/lora_adapters", "lora-adapters"),
        ("/v1/list_lora_adapters", "list-lora-adapters"),
        ("/v1/loras", "dynamo-loras"),
        ("/metadata", "metadata"),
        ("/health", "health"),
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


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(EngineUnavailable("slow"), 503), (EngineRejected("no", reason="rank"), 400), (NotFound("gone"), 404)],
)
def test_every_refusal_has_the_shape_of_an_error(refusal: Exception, status: int) -> None:
    """The proxy's own errors are vLLM's, too."""
    replica = FakeReplica(refusal=refusal)
    app = create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"model": "a1"}, **LOCAL)
    assert answer.status_code == status
    holds("error", answer.json())


def test_a_replica_that_is_not_ready_says_so_in_the_same_shape() -> None:
    """503 and 200 of /readyz differ in their values alone."""
    app = create_app(
        FakeReplica(ready=False), engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback")
    )
    with serving(app) as url:
        answer = httpx.get(f"{url}/readyz", **LOCAL)
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    holds("readiness", answer.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("load", {"lora_name": "a1", "lora_path": "/x"}),
        ("load", {"lora_name": "a1", "lora_path": "/x", "load_inplace": True, "is_3d_lora_weight": False}),
        ("unload", {"lora_name": "a1"}),
        ("unload", {"lora_name": "a1", "lora_int_id": 7}),
    ],
)
def test_bodies_of_vllms_clients_are_taken(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    """What a client written for vLLM sends is valid to the schema and to the route."""
    holds(f"{path}-request", body)
    assert http.post(f"/v1/{path}_lora_adapter", json=body).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "media_type", "name"),
    [
        ("get", "/v1/models", "200", "application/json", "model-list"),
        ("get", "/v1/models/{model}", "200", "application/json", "model-card"),
        ("get", "/v1/models/{model}", "404", "application/json", "error"),
        ("get", "/v1/lora_adapters", "200", "application/json", "lora-adapters"),
        ("get", "/v1/list_lora_adapters", "200", "application/json", "list-lora-adapters"),
        ("get", "/v1/loras", "200", "application/json", "dynamo-loras"),
        ("post", "/v1/loras", "200", "application/json", "dynamo-lora"),
        ("delete", "/v1/loras/{lora_name}", "503", "application/json", "error"),
        ("get", "/metadata", "200", "application/json", "metadata"),
        ("get", "/health", "200", "application/json", "health"),
        ("get", "/readyz", "200", "application/json", "readiness"),
        ("get", "/readyz", "503", "application/json", "readiness"),
        ("post", "/v1/load_lora_adapter", "200", "text/plain", None),
        ("post", "/v1/load_lora_adapter", "400", "application/json", "error"),
        ("post", "/v1/unload_lora_adapter", "200", "text/plain", None),
        ("post", "/v1/unload_lora_adapter", "404", "application/json", "error"),
    ],
)
def test_openapi_describes_each_answer(
    http: httpx.Client, method: str, path: str, status: str, media_type: str, name: str | None
) -> None:
    """The type of its body, and the very schema that lies in the folder."""
    document = http.get("/openapi.json").json()
    content = document["paths"][path][method]["responses"][status]["content"]
    assert list(content) == [media_type]
    if name is None:
        assert content[media_type]["schema"] == {"type": "string"}
    else:
        assert content[media_type]["schema"]["$ref"].endswith(f"/{schemas.load(name)['title']}")


def test_openapi_promises_no_other_shape_of_an_error(http: httpx.Client) -> None:
    """What the framework answers by itself to a bad request is nowhere in the document."""
    assert "HTTPValidationError" not in http.get("/openapi.json").text


def test_a_load_answers_text(http: httpx.Client) -> None:
    """As vLLM's own route does: not JSON."""
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "a1", "lora_path": "/x"})
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.text == "Success: LoRA adapter 'a1' added successfully."


@dataclass
class Odd(FakeReplica):
    """One whose record says when it was written in its own way, and whose base card may change."""

    written: str = ""
    cards: tuple[JsonObject, ...] = ()

    def catalog(self) -> Catalog:
        odd = RECORD.model_copy(update={"updated_at": self.written})
        return Catalog(self.version, {"a1": Served("a1", odd), "a2": Served("a2", RECORD)})

    def base_cards(self) -> tuple[JsonObject, ...]:
        return self.cards


@pytest.mark.parametrize(
    ("written", "created"),
    [
        ("", 0),
        ("yesterday", 0),
        ("0001-01-01T00:00:00+23:59", -62135683140),
        ("9999-12-31T23:59:59-23:59", 253402387139),
        ("1970-01-01T00:00:07", 7),
        ("1970-01-01T01:00:07+01:00", 7),
    ],
)
def test_a_record_whose_time_is_no_time_is_listed(written: str, created: int) -> None:
    """It is listed with 0, and so are all others: nothing rests on ``updated_at``."""
    with serving(
        create_app(
            Odd(written=written), engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback")
        )
    ) as url:
        body = httpx.get(f"{url}/v1/models", **LOCAL).json()
    holds("model-list", body)
    assert [(card["id"], card["created"]) for card in body["data"]] == [
        ("a1", created),
        ("a2", 1767225600),
    ]


def test_the_list_follows_the_engines_own_cards() -> None:
    """An engine that came back with another length says so; a new time alone changes no byte."""
    replica = Odd(cards=({"id": "tiny", "object": "model", "created": 1, "max_model_len": 64},))
    with serving(
        create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    ) as url:

        def ask() -> bytes:
            return httpx.get(f"{url}/v1/models", **LOCAL).content

        first = ask()
        replica.cards = ({**replica.cards[0], "created": 2},)
        assert ask() == first
        replica.cards = ({**replica.cards[0], "max_model_len": 128},)
        assert json.loads(ask())["data"][0]["max_model_len"] == 128


@dataclass
class Growing(FakeReplica):
    """One that learns of another adapter between two questions."""

    def residency(self) -> dict[str, JsonObject]:
        found = dict(super().residency())
        self.names = (*self.names, "a2")
        return found


def test_a_list_holds_while_the_volume_changes() -> None:
    """An adapter that comes while an answer is made is in this one or in the next."""
    app = create_app(Growing(), engine_url="http://127.0.0.1:9", admin=Admin(None, insecure="loopback"))
    with serving(app) as url:
        first, again = (httpx.get(f"{url}/v1/lora_adapters", **LOCAL).json() for _ in range(2))
    assert "a1" in [one["name"] for one in first["data"]]
    assert {one["name"] for one in again["data"]} == {"a1", "a2"}
