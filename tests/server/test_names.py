"""What a name without a namespace means to the calls that register and withdraw, where several are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.server.middleware.access import Admin
from tests.registry.conftest import write_adapter
from tests.server.conftest import tenants
from tests.sources.conftest import tar_of


@pytest.fixture
def http(tmp_path: Path) -> Iterator[httpx.Client]:
    with tenants(tmp_path, Admin(None, insecure="loopback")) as client:
        yield client


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "sources" / "a")


def names(http: httpx.Client) -> list[str]:
    return [one["name"] for one in http.get("/v1/lora_adapters").json()["data"]]


def test_load_and_unload(http: httpx.Client, source: Path) -> None:
    """It is of the first namespace; the answer says what clients send."""
    answer = http.post("/v1/load_lora_adapter", json={"lora_name": "sql", "lora_path": str(source)})
    assert (answer.status_code, "'team-a/sql' added" in answer.text) == (200, True), answer.text
    assert names(http) == ["team-a/sql"]
    http.post("/v1/load_lora_adapter", json={"lora_name": "team-b/sql", "lora_path": str(source)})
    answer = http.post("/v1/unload_lora_adapter", json={"lora_name": "sql@v1"})
    assert (answer.status_code, names(http)) == (200, ["team-b/sql"])
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 404


def test_dynamos_calls(http: httpx.Client, source: Path) -> None:
    """As above, and answered with the name that was asked for."""
    for how in ("loaded successfully", "already loaded"):
        answer = http.post("/v1/loras", json={"lora_name": "sql", "source": {"uri": source.as_uri()}})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["lora_name"], how in answer.json()["message"]) == ("sql", True)
    assert list(http.get("/v1/loras").json()["loras"]) == ["team-a/sql"]
    answer = http.delete("/v1/loras/sql")
    assert (answer.json()["lora_name"], "unloaded" in answer.json()["message"]) == ("sql", True)
    assert names(http) == []


def test_an_upload(http: httpx.Client, source: Path) -> None:
    """Its answer has the name that clients send."""
    kind = {"content-type": "application/x-tar"}
    answer = http.post("/v1/lora_adapters?name=sql", content=tar_of(source), headers=kind)
    assert (answer.status_code, answer.json()["name"]) == (201, "team-a/sql")


@pytest.mark.parametrize("route", ["vllm", "dynamo"])
def test_a_name_that_serves_nothing_is_withdrawn(http: httpx.Client, source: Path, route: str) -> None:
    """It has a revision, by which it can be asked for: to say that it is not registered would not be true."""
    kind = {"content-type": "application/x-tar"}

    def withdraw(name: str) -> httpx.Response:
        if route == "dynamo":
            return http.delete(f"/v1/loras/{quote(name, safe='')}")
        return http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    sent = http.post("/v1/lora_adapters?name=sql&activate=false", content=tar_of(source), headers=kind)
    assert sent.status_code == 201, sent.text
    served = "/v1/models/team-a/sql@v1"
    wait_until("the revision is seen", lambda: http.get(served).status_code == 200, timeout_s=60)
    answer = withdraw("sql")
    assert (answer.status_code, "not registered" in answer.text) == (200, False), answer.text
    assert http.get(served).status_code == 404
    for name in ("sql", "no such", "team-c/sql", "tiny", "../../v1/sql", "team-a/../v1/sql", "sql@v1"):
        answer = withdraw(name)
        assert (answer.status_code == 404) or "not registered" in answer.text, answer.text
