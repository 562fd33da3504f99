"""A replica whose engine is paused is no broken one: clients ask it again, and a gateway does not eject it.

From 0.33 on a paused vLLM answers 503 to what comes in. Older ones let it wait. As for
``test_two_versions``, ``OTHER_ENGINE_PYTHON`` is the interpreter of the newer vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import httpx
import openai
import pytest
from packaging.version import Version

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT, PluginReplica, Replica, TellingReplica, openai_client
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.gateway.outliers import FAILURES
from tests.e2e.test_gateway import gateway as gateway
from tests.e2e.test_gateway import ready, say, stream
from tests.e2e.test_old_engines import version
from tests.e2e.test_two_versions import needs_two
from tests.e2e.test_two_versions import newer as newer

pytestmark = needs_two

NAMES = [f"tenant-{number}" for number in range(1, 7)]
REFUSES = Version("0.33")


class TellingPlugin(PluginReplica):
    """Its engine has vLLM's routes for a trainer."""

    engine_env: ClassVar[Mapping[str, str]] = TellingReplica.engine_env


@pytest.fixture(scope="module", params=[TellingReplica, TellingPlugin], ids=["sidecar", "plugin"])
def kind(request: pytest.FixtureRequest) -> type[Replica]:
    """Both ways to run a replica keep the same promises."""
    found: type[Replica] = request.param
    return found


@pytest.fixture(scope="module")
def pair(
    newer: EngineFarm,
    model_dir: Path,
    kind: type[Replica],
    adapters: Callable[[int], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair[Replica]]:
    """Two ready replicas of the newer vLLM, and six adapters."""
    work = tmp_path_factory.mktemp("paused")
    volume = Volume(work / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.root.mkdir()
    volume.run("init")
    for seed, name in enumerate(NAMES, 1):
        volume.run("register", name, str(adapters(seed)))
    with closing(Pair(newer, model_dir, volume, work, kind=kind, settings={"settle_s": "0.5"})) as pair:
        pair.wait_ready()
        if version(pair.a) < REFUSES:
            pytest.skip(f"vLLM {REFUSES}: a paused one lets requests wait before it")
        yield pair


def test_a_paused_engine(pair: Pair[Replica], gateway: Process) -> None:
    """Each request for its adapters is 503 with Retry-After, or an error event, until it is resumed."""
    wait_until("both replicas are in", lambda: len(ready(gateway)) == 2, timeout_s=60)
    with (
        closing(openai_client(gateway.url)) as client,
        httpx.Client(base_url=gateway.url, **LOCAL) as http,
        httpx.Client(base_url=pair.a.engine_url, **LOCAL) as engine,
    ):

        def fleet(adapter: str) -> tuple[list[str], dict[str, str]]:
            told = http.get("/v1/fleet", params={"adapter": adapter}).raise_for_status().json()
            return told["order"], {one["replica"]: one["state"] for one in told["replicas"]}

        right = {name: say(client, name) for name in NAMES}
        assert len(set(right.values())) == len(NAMES)
        at_a = next(name for name in NAMES if fleet(name)[0][0] == pair.a.name)
        at_b = next(name for name in NAMES if fleet(name)[0][0] == pair.b.name)
        engine.post("/pause", params={"mode": "abort"}).raise_for_status()
        body = {"model": at_a, "prompt": PROMPT, "max_tokens": 8}
        for _ in range(2 * FAILURES):
            answer = http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "paused" in answer.json()["error"]["message"]
        with pytest.raises(openai.APIError, match="paused"):
            stream(client, at_a)
        assert fleet(at_a)[1] == {pair.a.name: "ready", pair.b.name: "ready"}
        assert say(client, at_b) == right[at_b]
        engine.post("/resume").raise_for_status()
        assert {name: say(client, name) for name in NAMES} == right
        assert stream(client, at_a) == right[at_a]
