"""The gateway before two real vLLMs: right answers, each adapter on one engine, and a replica that dies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import openai
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.replica import PROMPT, Replica, TellingReplica, openai_client
from lora_fs.demo.sidecar import start_gateway
from lora_fs.demo.tiny_llama import CONTEXT, MODEL_NAME
from lora_fs.demo.waiting import wait_until
from tests.e2e.trl_calls import TrlCalls

NAMES = [f"tenant-{number}" for number in range(1, 7)]


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """Whoever reaches a replica may register: a gateway is no caller on its own machine's behalf."""
    return {"settle_s": "0.5", "insecure": "any"}


@pytest.fixture(scope="module")
def kind() -> type[Replica]:
    """Trainers ask engines for their configuration."""
    return TellingReplica


@pytest.fixture(scope="module")
def gateway(pair: Pair[Replica], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A gateway that was told where both replicas are."""
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    process = start_gateway((replica.url for replica in pair.both), log=log)
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def client(gateway: Process) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, at the gateway."""
    with closing(openai_client(gateway.url)) as client:
        yield client


@pytest.fixture(scope="module")
def expected(pair: Pair[Replica], gateway: Process, adapters: Callable[[int], Path]) -> dict[str, str]:
    """What a replica says of the base model and of the first of six adapters, which are registered now."""
    for seed, name in enumerate(NAMES, 1):
        pair.volume.run("register", name, str(adapters(seed)))
    pair.wait_listed(NAMES[-1])
    wait_until("both replicas are in", lambda: len(ready(gateway)) == 2, timeout_s=60)
    return {name: pair.a.answer(name) for name in (MODEL_NAME, *NAMES[:1])}


def ready(gateway: Process) -> list[str]:
    """The replicas that the gateway sends requests to."""
    told: list[str] = httpx.get(f"{gateway.url}/health", **LOCAL).json()["ready"]
    return told


def say(client: openai.OpenAI, name: str) -> str:
    """A greedy answer, as ``Replica.answer`` asks for it."""
    told = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0)
    return told.choices[0].text.strip()


def stream(client: openai.OpenAI, name: str) -> str:
    """The same as a stream."""
    events = client.completions.create(model=name, prompt=PROMPT, max_tokens=8, temperature=0, stream=True)
    return "".join(event.choices[0].text for event in events).strip()


def test_answers_are_the_replicas(
    pair: Pair[Replica], client: openai.OpenAI, expected: dict[str, str]
) -> None:
    """Every adapter's answer, at once and streamed, is what a replica says; the list is a replica's."""
    assert {card.id for card in client.models.list()} == pair.a.names()
    assert say(client, MODEL_NAME) == expected[MODEL_NAME]
    with ThreadPoolExecutor(len(NAMES)) as pool:
        told = dict(zip(NAMES, pool.map(lambda name: say(client, name), NAMES), strict=True))
    assert len(set(told.values())) == len(NAMES)
    assert told[NAMES[0]] == expected[NAMES[0]]
    assert {name: stream(client, name) for name in NAMES} == told
    held = [replica.engine_names() & set(NAMES) for replica in pair.both]
    assert held[0] | held[1]
    asked_at_a = set(NAMES[:1])  # by the fixture, and the gateway may not know yet
    assert held[0] & held[1] <= asked_at_a, "an adapter that few ask for is in one engine"
    with pytest.raises(openai.NotFoundError):
        say(client, "nobody")


def test_a_replica_that_dies(
    pair: Pair[Replica], gateway: Process, client: openai.OpenAI, expected: dict[str, str]
) -> None:
    """What it held is answered right by the other one, and it is in again once it is back."""
    before = {name: say(client, name) for name in NAMES}
    pair.b.kill()
    wait_until("it is out", lambda: len(ready(gateway)) == 1, timeout_s=60)
    assert {name: say(client, name) for name in NAMES} == before
    assert before[NAMES[0]] == expected[NAMES[0]]
    pair.b.start()
    pair.b.wait_ready()
    wait_until("it is in", lambda: len(ready(gateway)) == 2, timeout_s=60)
    assert {name: say(client, name) for name in NAMES} == before


def test_a_load_by_the_gateway_is_on_both_engines(
    pair: Pair[Replica],
    gateway: Process,
    client: openai.OpenAI,
    expected: dict[str, str],
    adapters: Callable[[int], Path],
) -> None:
    """One call loads a policy on both engines, a pause holds its requests alone, one call takes it away."""
    source = adapters(1)  # the bytes of the first adapter, whose answer is known
    with httpx.Client(base_url=gateway.url, **LOCAL) as http:
        body = {"lora_name": "policy-v1", "lora_path": str(source)}
        loaded = http.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        assert all("policy-v1" in replica.engine_names() for replica in pair.both)
        assert say(client, "policy-v1") == expected[NAMES[0]]
        assert http.post("/pause?mode=wait&lora_name=policy-v1").status_code == 200
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(say, client, "policy-v1")
            assert say(client, MODEL_NAME) == expected[MODEL_NAME]
            assert not held.done()
            assert http.post("/resume?lora_name=policy-v1").status_code == 200
            assert held.result() == expected[NAMES[0]]
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "policy-v1"})
        assert gone.status_code == 200, gone.text
        assert not any("policy-v1" in replica.engine_names() for replica in pair.both)


def test_a_scrape_of_a_replica_has_its_engines_series(
    pair: Pair[Replica], client: openai.OpenAI, expected: dict[str, str]
) -> None:
    """A router that scrapes the sidecar sees vLLM's load and adapters, by the names that clients know."""
    assert say(client, NAMES[0]) == expected[NAMES[0]]
    text = "".join(replica.http.get("/metrics").text for replica in pair.both)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert f"\n{name}{{" in text
    assert text.count("\nlora_fs_engine_metrics 1.0\n") == 2
    listed = [line for line in text.splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert listed
    assert not [line for line in listed if f"{NAMES[0]}@" in line]


def test_a_trainer_publishes_three_policies_as_trl_does(
    pair: Pair[Replica], gateway: Process, adapters: Callable[[int], Path], model_dir: Path
) -> None:
    """Each policy's greedy answer is that of transformers and PEFT, at both replicas and at the gateway."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompt = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    saved, said = model_dir.parent / "run1" / ".vllm_lora", []
    with ExitStack() as opened:
        fleet, *each = (
            TrlCalls(opened.enter_context(httpx.Client(base_url=url, **LOCAL)))
            for url in (gateway.url, pair.a.url, pair.b.url)
        )
        fleet.wait_for_server_ready()
        assert fleet.get_max_model_len() == CONTEXT
        info = fleet.get_server_info()
        assert info["model_config"]["dtype"] == "torch.float32"
        assert info["parallel_config"]["data_parallel_size"] == 1
        assert info["lora_config"]["max_loras"] >= 2, "the policy that is published, and the one before"
        for version in (1, 2, 3):
            name = f"trl-policy-v{version}"
            fleet.pause()
            shutil.copytree(adapters(20 + version), saved / name)
            fleet.load_lora_adapter(name, str(saved / name))
            fleet.resume()
            assert all(name in replica.engine_names() for replica in pair.both)
            fleet.unload_lora_adapter(f"trl-policy-v{version - 1}")
            expected = generated(model_dir, saved / name, prompt)
            for calls in (fleet, *each):
                tokens, chances = calls.turn(name, prompt[0].tolist(), 8, 0.0)
                assert tokens == expected, name
                assert len(chances) == len(tokens)
            said.append(tuple(expected))
        assert len(set(said)) == 3
        assert all(
            replica.engine_names().isdisjoint({"trl-policy-v1", "trl-policy-v2"}) for replica in pair.both
        )


def generated(base: Path, adapter: Path, prompt: torch.Tensor) -> list[int]:
    """What transformers and PEFT say."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        whole = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0]
    told: list[int] = whole[prompt.shape[1] :].tolist()
    return told
