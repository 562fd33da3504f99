"""Engines and sidecars die and come back; what the volume says is served again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT, Replica, SidecarReplica
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.model import public_of, tells_bytes
from lora_fs.sidecar.reconcile.stage.looks import digest_at

Served = dict[str, str]

POLICIES = ("lazy", "sticky", "eager")
BACK_S = 60.0
LONG = 200  # tokens: of a second at least


@pytest.fixture(scope="module")
def served(
    pair: Pair[SidecarReplica], register: Callable[..., None], adapters: Callable[[int], Path]
) -> Served:
    """The base model and an adapter of each policy: what each answers on both."""
    for seed, policy in enumerate(POLICIES, start=35):
        register(policy, adapters(seed), "--policy", policy)
    return {name: pair.answer(name) for name in ("tiny", *POLICIES)}


def answers(replica: Replica, served: Served) -> Served:
    """What ``replica`` answers to the same names."""
    return {name: replica.answer(name) for name in served}


def engine_paths(replica: SidecarReplica) -> dict[str, str]:
    """The adapters that the engine lists, and where each was loaded from."""
    listed = httpx.get(f"{replica.engine_url}/v1/models", **LOCAL).raise_for_status()
    return {card["id"]: card["root"] for card in listed.json()["data"] if card["parent"]}


def engine_call(replica: SidecarReplica, act: str, **body: str) -> None:
    """Load or unload past the sidecar."""
    url = f"{replica.engine_url}/v1/{act}_lora_adapter"
    httpx.post(url, json=body, **LOCAL | {"timeout": 30}).raise_for_status()


def wait_answered(replica: Replica, served: Served) -> None:
    """Wait until all are answered as before; a wrong answer or a 404 on the way is a failure."""

    def answered() -> bool:
        try:
            assert answers(replica, served) == served
        except openai.InternalServerError:
            return False
        return True

    wait_until(f"{replica.name} answers as before", answered, timeout_s=BACK_S)


def test_an_engine_that_died_alone(pair: Pair[SidecarReplica], served: Served) -> None:
    """Its sidecar lists on, answers 5xx while it is down and is not ready, then loads all of it again."""
    a, b = pair.both
    a.engine.kill()
    assert set(served) <= a.names()
    with pytest.raises(openai.InternalServerError):
        a.answer("lazy")
    assert a.http.get("/readyz").status_code == 503  # a request failed: nobody waits for the next pass
    assert answers(b, served) == served
    a.start_engine()
    a.engine.wait_ready()
    wait_answered(a, served)
    a.sidecar.wait_ready("/readyz")


def test_an_engine_told_to_stop_while_it_answers(pair: Pair[SidecarReplica], served: Served) -> None:
    """No client takes a text that is cut off for an answer: vLLM sends it with 200 and "abort"."""
    a = pair.a
    asks: Callable[..., Any] = partial(
        a.openai.completions.create, prompt=PROMPT, max_tokens=LONG, extra_body={"ignore_eos": True}
    )
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(asks, model="lazy")
        stream = asks(model="sticky", stream=True)
        next(stream)
        a.engine.stop()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            list(stream)
        with pytest.raises(openai.APIError):
            answer.result()
    a.start_engine()
    a.engine.wait_ready()
    wait_answered(a, served)


def test_an_engine_that_forgot_between_two_looks(pair: Pair[SidecarReplica], served: Served) -> None:
    """A restart too quick for the sidecar to have seen it costs no client a 404."""
    assert answers(pair.a, served) == served
    pair.a.engine.kill()
    pair.a.start_engine()
    pair.a.engine.wait_ready()
    wait_answered(pair.a, served)


def test_an_engine_that_hangs(pair: Pair[SidecarReplica], served: Served) -> None:
    """Its sidecar still lists, the other replica still serves, and it recovers by itself."""
    a, b = pair.both
    os.kill(a.engine.pid, signal.SIGSTOP)
    try:
        assert set(served) <= a.names()
        assert answers(b, served) == served
    finally:
        os.kill(a.engine.pid, signal.SIGCONT)
    wait_answered(a, served)


def test_an_eager_adapter_returns_without_a_request(pair: Pair[SidecarReplica], served: Served) -> None:
    """An engine that forgot everything is given what must be in it, unasked."""
    assert "eager" in served
    pair.b.engine.kill()
    pair.b.start_engine()
    pair.b.engine.wait_ready()
    wait_until(
        "eager is in the engine",
        lambda: any("eager" in name for name in pair.b.engine_names()),
        timeout_s=BACK_S,
    )


def test_a_sidecar_that_died_alone(pair: Pair[SidecarReplica], served: Served) -> None:
    """Its successor meets an engine with adapters in it, and serves on."""
    pair.a.sidecar.kill()
    pair.a.start_sidecar()
    pair.a.wait_ready()
    assert answers(pair.a, served) == served


def test_a_sidecar_of_an_older_lora_fs(pair: Pair[SidecarReplica], served: Served) -> None:
    """What it loaded under plain names goes, and is loaded under names that tell its bytes."""
    a = pair.a
    a.sidecar.kill()
    old: dict[str, str] = {}
    for name, path in engine_paths(a).items():
        engine_call(a, "unload", lora_name=name)
        old |= {public_of(name): path, f"{public_of(name)}@v1~{name.rpartition('@')[2]}": path}
    assert "eager" in old
    for name, path in old.items():
        engine_call(a, "load", lora_name=name, lora_path=path)
    a.start_sidecar()
    a.wait_ready()
    assert answers(a, served) == served
    wait_until("the old names are gone", lambda: not engine_paths(a).keys() & old.keys(), timeout_s=BACK_S)
    assert answers(a, served) == served
    assert all(tells_bytes(name, digest_at(path)) for name, path in engine_paths(a).items())


def test_a_replica_that_died_whole(pair: Pair[SidecarReplica], served: Served) -> None:
    """A pod that comes back lists and answers as before from its first moment of readiness."""
    pair.b.kill()
    pair.b.start_engine()
    pair.b.start_sidecar()
    pair.b.wait_ready()
    assert set(served) <= pair.b.names()
    assert answers(pair.b, served) == served


def test_registered_while_a_replica_was_away(
    pair: Pair[SidecarReplica], served: Served, adapters: Callable[[int], Path]
) -> None:
    """A replica that was down finds it when it comes back."""
    assert "meanwhile" not in served
    pair.b.kill()
    pair.volume.run("register", "meanwhile", str(adapters(38)))
    pair.b.start_engine()
    pair.b.start_sidecar()
    pair.b.wait_ready()
    assert pair.answer("meanwhile")


def test_a_sidecar_told_to_stop(pair: Pair[SidecarReplica]) -> None:
    """SIGTERM ends it by itself, without a traceback, well within a pod's grace period."""
    pair.a.sidecar.terminate()
    assert pair.a.sidecar.wait_ended(timeout_s=20)
    assert "Traceback" not in pair.a.sidecar.log_text()
    pair.a.start_sidecar()
    pair.a.wait_ready()
