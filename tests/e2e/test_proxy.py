"""Requests through the sidecar are streamed, share a load, and end the engine's work with them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT, Replica, SidecarReplica, openai_client
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.model import public_of

Adapters = Callable[[int], Path]
Register = Callable[..., None]

LONG = 200
# As many prompts as no test waits for the end of: they take half a minute, and more on a busy machine.
ENDLESS: dict[str, Any] = {
    "prompt": [PROMPT] * 1_000,
    "max_tokens": LONG,
    "temperature": 0,
    "ignore_eos": True,
}
LOAD_CALL = '"POST /v1/load_lora_adapter'
METRICS_CALL = '"GET /metrics'


class Pausable(SidecarReplica):
    """Its engine can be held between two tokens, and then let go on."""

    engine_env: ClassVar[Mapping[str, str]] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No request of the engine's goes on within."""
        held = {"mode": "keep"}
        httpx.post(f"{self.engine_url}/pause", params=held, **LOCAL).raise_for_status()
        try:
            yield
        finally:
            httpx.post(f"{self.engine_url}/resume", **LOCAL).raise_for_status()


@pytest.fixture(scope="module")
def kind() -> type[Replica]:
    """Both can be paused."""
    return Pausable


@pytest.fixture(scope="module")
def settings(settings: dict[str, str]) -> dict[str, str]:
    """The engine is asked often."""
    return settings | {"resync_s": "0.5"}


def streamed(replica: Replica, model: str) -> Iterator[str]:
    """The pieces of a long answer, as they arrive."""
    stream = replica.openai.completions.create(
        model=model, prompt=PROMPT, max_tokens=LONG, temperature=0, stream=True
    )
    for chunk in stream:
        yield chunk.choices[0].text


def metric(replica: Replica, name: str) -> float:
    """A metric of the engine, summed over its labels."""
    lines = httpx.get(f"{replica.engine_url}/metrics", **LOCAL).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_an_engine_is_asked_for_a_part_of_its_metrics(pair: Pair[Pausable]) -> None:
    """Writing all of them holds its streams up for milliseconds at each look."""

    def asked(what: str) -> int:
        return pair.a.engine.log_text().count(what)

    parts, whole = asked(f"{METRICS_CALL}/?name"), asked(f"{METRICS_CALL} ")
    wait_until("it is asked again", lambda: asked(f"{METRICS_CALL}/?name") > parts + 2, timeout_s=60)
    assert asked(f"{METRICS_CALL} ") == whole


def test_sagemakers_calls_are_the_registrys(pair: Pair[Pausable], adapters: Adapters) -> None:
    """They register and unregister for every replica; of no spelling does the engine hear."""
    http = pair.a.http
    body = {"name": "made", "src": str(adapters(24)), "lora_name": "made", "lora_path": str(adapters(24))}
    held = pair.a.engine_names()
    spellings = ("//adapters", "/Adapters", "/v1/..%2fadapters", "/v1/adapters", "/x/adapters")
    for path in spellings:
        assert http.post(path, json=body).status_code in (400, 404, 405), path
        assert http.delete(f"{path}/made").status_code in (400, 404, 405), path
    assert pair.a.engine_names() == held
    assert http.post("/adapters", json=body).text == "Adapter made registered"
    wait_until("it is listed", lambda: "made" in pair.b.names(), timeout_s=60)
    assert pair.b.answer("made") == pair.a.answer("made")
    assert http.delete("/adapters/made").text == "Adapter made unregistered"
    wait_until("it is gone", lambda: "made" not in pair.b.names(), timeout_s=60)


def test_weights_of_float64(
    pair: Pair[Pausable], register: Register, adapters: Adapters, tmp_path: Path
) -> None:
    """vLLM converts them: the answer is that of the same weights in float32."""
    folder = shutil.copytree(adapters(25), tmp_path / "double")
    weights = folder / "adapter_model.safetensors"
    save_file({name: array.astype(np.float64) for name, array in load_file(weights).items()}, weights)
    register("double", folder)
    register("single", adapters(25))
    assert pair.a.answer("double") == pair.a.answer("single") != pair.a.answer(MODEL_NAME)
    body = {"model": "double", "prompt": PROMPT, "max_tokens": 1}
    answered = pair.a.http.post("/v1/completions", json=body).headers
    assert answered["x-lora-fs-adapter"] == f"default/{MODEL_NAME}/v1/double"


def test_a_stream_is_passed_on_whole(pair: Pair[Pausable], register: Register, adapters: Adapters) -> None:
    """Events are passed on as the engine sends them, framing and ``[DONE]`` included.

    How many is the engine's choice: tokens that were computed while its server was busy come as one.
    """
    register("piecewise", adapters(21))
    asked = {"model": "piecewise", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    whole = pair.a.http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]
    body = asked | {"stream": True, "stream_options": {"include_usage": True}}
    with pair.a.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["usage"]["completion_tokens"] == LONG
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


def test_a_stream_arrives_piece_by_piece_and_ends_with_its_client(
    pair: Pair[Pausable], register: Register, adapters: Adapters
) -> None:
    """A piece is here long before the last is computed; a closed connection ends the engine's work."""
    register("abandoned", adapters(23))
    pair.a.answer("abandoned")
    before = metric(pair.a, "vllm:generation_tokens_total")
    body = {**ENDLESS, "model": "abandoned", "stream": True}
    with pair.a.http.stream("POST", "/v1/completions", json=body) as response:
        assert next(response.iter_lines())
    # An engine that was not told computes to the end, however soon: the count below finds that.
    wait_until("the engine is idle", lambda: metric(pair.a, "vllm:num_requests_running") == 0, timeout_s=200)
    assert metric(pair.a, "vllm:generation_tokens_total") - before < len(ENDLESS["prompt"]) * LONG / 2


def test_a_chat_is_passed_on(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Whatever path under /v1 names an adapter is served by it."""
    register("chatty", adapters(22))

    def reply(model: str) -> str | None:
        chat = pair.a.openai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=8,
            temperature=0,
        )
        return chat.choices[0].message.content

    assert reply("chatty")
    assert reply("chatty") != reply("tiny")


def test_no_answer_has_the_engines_name(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Answers, events of streams, errors, and an answer that vLLM stored: all say what was asked for."""
    register("asked", adapters(26))
    pair.a.answer("asked")
    chat = {"model": "asked", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4}
    response = {"model": "asked", "input": PROMPT, "max_output_tokens": 4}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"model": "asked", "prompt": PROMPT, "max_tokens": 4}),
        ("/v1/chat/completions", chat),
        ("/v1/messages", chat),
        ("/v1/responses", response),
    ]
    for path, body in calls:
        for more in ({}, {"stream": True}):
            told = pair.a.http.post(path, json=body | more).raise_for_status()
            assert set(re.findall(r'"model": ?"([^"]*)"', told.text)) == {"asked"}, told.text
            assert "asked@" not in told.text + str(told.headers), path
    refused = pair.a.http.post("/v1/completions", json=calls[0][1] | {"max_tokens": 10**6})
    assert (refused.status_code, "asked@" in refused.text) == (400, False)
    made = pair.a.openai.responses.create(model="asked", input=PROMPT, max_output_tokens=4, store=True)
    assert pair.a.openai.responses.retrieve(made.id).model == made.model == "asked"


def test_many_first_requests_make_one_load(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """Requests that meet an adapter not yet loaded share its one load."""
    before = pair.a.engine.log_text().count(LOAD_CALL)
    register("stampede", adapters(24), "--policy", "lazy")
    with ThreadPoolExecutor(12) as pool:
        answers = set(pool.map(pair.a.answer, ["stampede"] * 12))
    assert len(answers) == 1
    assert pair.a.engine.log_text().count(LOAD_CALL) - before == 1


def test_a_request_in_flight_keeps_its_adapter(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """Unregistering lets an open stream end as it would have, and turns later ones away."""
    register("draining", adapters(25))
    whole = list(streamed(pair.a, "draining"))
    stream = streamed(pair.a, "draining")
    pieces = [next(stream)]
    pair.volume.run("unregister", "draining", "--all-revisions")
    assert "".join([*pieces, *stream]) == "".join(whole)
    pair.wait_delisted("draining")
    with pytest.raises(openai.NotFoundError):
        pair.a.answer("draining")


def test_a_promotion_beside_a_stream(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """The open stream ends from the old bytes while new requests are answered from the new."""
    register("switching", adapters(44))
    register("switching", adapters(45), "--no-activate")
    whole = list(streamed(pair.a, "switching"))
    second = pair.a.answer("switching@v2")
    stream = streamed(pair.a, "switching")
    pieces = [next(stream)]
    pair.volume.run("promote", "switching", "v2", "--wait", "20")
    assert pair.a.answer("switching") == second
    assert "".join([*pieces, *stream]) == "".join(whole)
    assert pair.answer("switching") == second


def test_a_stream_on_the_engines_own_port(
    pair: Pair[Pausable], register: Register, adapters: Adapters
) -> None:
    """A request the proxy never saw keeps its adapter too, as the engine's metric tells of it.

    Its client asks for the name that the engine lists.
    """
    register("direct", adapters(43))
    pair.a.answer("direct")
    with openai_client(pair.a.engine_url) as direct:
        options = {key: value for key, value in ENDLESS.items() if key != "ignore_eos"}
        (name,) = (card.id for card in direct.models.list() if public_of(card.id) == "direct")
        stream = direct.completions.create(
            model=name, stream=True, extra_body={"ignore_eos": True}, **options
        )
        assert next(stream).choices[0].text
        with pair.a.paused():
            pair.b.http.post("/v1/unload_lora_adapter", json={"lora_name": "direct"}).raise_for_status()
            pair.wait_delisted("direct")
            asked = pair.a.engine.log_text().count(METRICS_CALL)
            wait_until(
                "the sidecar has asked again and again what runs",
                lambda: pair.a.engine.log_text().count(METRICS_CALL) > asked + 3,
                timeout_s=60,
            )
            assert "direct" in pair.a.engine_names()
        assert all(next(stream).choices[0].text for _ in range(LONG))
        stream.close()
    wait_until("the engine lets go", lambda: "direct" not in pair.a.engine_names(), timeout_s=60)
