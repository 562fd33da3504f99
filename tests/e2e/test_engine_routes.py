"""What the sidecar makes of an engine's routes: those it forwards, and those it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import httpx
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import Replica, SidecarReplica
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.server.proxy.paths import INFERENCE, NOT_FORWARDED

OWN = frozenset({"/adapters", "/adapters/{adapter_name}"})  # SageMaker's, which the sidecar answers


class WithoutRuntimeLoading(SidecarReplica):
    """Its engine serves LoRA and takes no adapter while it runs. It shows every route that it has."""

    engine_env: ClassVar[Mapping[str, str]] = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "VLLM_SERVER_DEV_MODE": "1",
    }

    def wait_ready(self, *, timeout_s: float = 120) -> None:
        """It never is: wait for the sidecar's reason."""
        wait_until("the condition", lambda: "cannot load adapters" in self.readyz().text, timeout_s=timeout_s)

    def readyz(self) -> httpx.Response:
        """What the sidecar says of itself, also while it cannot be reached."""
        try:
            return httpx.get(f"{self.url}/readyz", **LOCAL)
        except httpx.TransportError:
            return httpx.Response(503)


@pytest.fixture(scope="module")
def kind() -> type[Replica]:
    """Both engines are without the route."""
    return WithoutRuntimeLoading


def test_every_route_of_the_engine_is_known(pair: Pair[WithoutRuntimeLoading]) -> None:
    """Each is forwarded, answered by the sidecar, or listed as the operator's: none is new."""
    document = httpx.get(f"{pair.a.engine_url}/openapi.json", **LOCAL).raise_for_status().json()
    known = {*INFERENCE, *NOT_FORWARDED, *OWN}
    assert {path for path in document["paths"] if not path.startswith("/v1/")} - known == set()
    assert {"/tokenize", "/detokenize", "/version"} <= document["paths"].keys() & set(INFERENCE)


def test_an_engine_without_runtime_loading_is_not_ready(pair: Pair[WithoutRuntimeLoading]) -> None:
    """The condition says how to start vLLM, and the base model is answered."""
    answer = pair.a.readyz()
    assert (answer.status_code, answer.json()["ready"]) == (503, False)
    (told,) = [one for one in answer.json()["conditions"] if one.startswith("NoRuntimeLoading")]
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in told
    cards = httpx.get(f"{pair.a.url}/v1/models", **LOCAL).raise_for_status().json()["data"]
    body = {"model": cards[0]["id"], "prompt": "x", "max_tokens": 1}
    httpx.post(f"{pair.a.url}/v1/completions", json=body, **LOCAL).raise_for_status()
