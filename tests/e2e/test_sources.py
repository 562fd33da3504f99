"""An adapter that lies on a hub is fetched by one replica and served by both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import Replica, SidecarReplica
from tests.sources.conftest import Hub, WebServer, serving

Adapters = Callable[[int], Path]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A hub on loopback, which the replicas find by HF_ENDPOINT."""
    with pytest.MonkeyPatch.context() as patch:
        for web in serving(WebServer()):
            patch.setenv("HF_ENDPOINT", web.url)
            patch.delenv("HF_HUB_OFFLINE", raising=False)
            yield Hub(web)


@pytest.fixture(scope="module")
def settings(hub: Hub) -> dict[str, str]:
    """Requests may make a replica fetch from one organisation, and follow the redirect to large files."""
    stored = f"http://localhost:{hub.web.port}"
    return {"settle_s": "0.5", "allowed_remotes": f"hf://acme,{stored}"}


@pytest.fixture(scope="module")
def kind() -> type[Replica]:
    """Stock engines with sidecars."""
    return SidecarReplica


def test_loaded_from_the_hub_on_one_replica(pair: Pair[Replica], hub: Hub, adapters: Adapters) -> None:
    """``POST /v1/load_lora_adapter`` with ``hf://`` at b: registered with its commit, answered by both."""
    base = pair.answer("tiny")
    hub.publish(adapters(20), "c" * 40)
    body = {"lora_name": "from-hub", "lora_path": "hf://acme/sql-lora"}
    response = pair.b.http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text
    pair.wait_listed("from-hub")
    assert pair.answer("from-hub") != base
    rows = pair.a.http.get("/v1/lora_adapters").json()["data"]
    (spec,) = (row["record"]["spec"] for row in rows if row["name"] == "from-hub")
    assert spec["source"] == {"uri": "hf://acme/sql-lora", "pin": "c" * 40}
    other = {"lora_name": "no", "lora_path": "hf://somebody/else"}
    assert pair.a.http.post("/v1/load_lora_adapter", json=other).status_code == 400
