"""Requests through the sidecar are streamed, share a load, and end the engine's work with them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PROMPT, Replica
from lora_fs.demo.waiting import wait_until

Adapters = Callable[[int], Path]
Register = Callable[..., None]

LONG = 200
LOAD_CALL = '"POST /v1/load_lora_adapter'


def streamed(replica: Replica, model: str) -> Iterator[str]:
    """The pieces of a long answer, as they arrive."""
    stream = replica.openai.completions.create(
        model=model, prompt=PROMPT, max_tokens=LONG, temperature=0, stream=True
    )
    for chunk in stream:
        yield chunk.choices[0].text


def metric(replica: Replica, name: str) -> float:
    """A metric of the engine, summed over its labels."""
    lines = httpx.get(f"{replica.engine_url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name + "{"))


def test_a_stream_arrives_piece_by_piece(pair: Pair[Replica], register: Register, adapters: Adapters) -> None:
    """Events are passed on when the engine sends them, framing and ``[DONE]`` included.

    How many is the engine's choice: tokens that were computed while its server was busy come as one.
    """
    register("piecewise", adapters(21))
    asked = {"model": "piecewise", "prompt": PROMPT, "max_tokens": LONG, "temperature": 0, "ignore_eos": True}
    whole = pair.a.http.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]
    body = asked | {"stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    arrivals_s: list[float] = []
    events: list[str] = []
    with pair.a.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in filter(None, response.iter_lines()):
            arrivals_s.append(time.monotonic() - began)
            events.append(line.removeprefix("data: "))
    assert events.pop() == "[DONE]"
    assert json.loads(events.pop())["usage"]["completion_tokens"] == LONG
    assert arrivals_s[0] < arrivals_s[-1] / 3
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole


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


def test_a_client_that_leaves_frees_the_engine(
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """A closed connection ends the engine's work long before its last token."""
    register("abandoned", adapters(23))
    pair.a.answer("abandoned")
    before = metric(pair.a, "vllm:generation_tokens_total")
    body = {"model": "abandoned", "prompt": PROMPT, "max_tokens": LONG, "stream": True}
    with pair.a.http.stream("POST", "/v1/completions", json=body) as response:
        list(itertools.islice(response.iter_lines(), 5))
    wait_until(
        "the engine is idle",
        lambda: metric(pair.a, "vllm:num_requests_running") == 0,
        timeout_s=5,
    )
    assert metric(pair.a, "vllm:generation_tokens_total") - before < LONG / 2


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
    pair: Pair[Replica], register: Register, adapters: Adapters
) -> None:
    """A request the proxy never saw keeps its adapter too, as the engine's metric tells of it."""
    register("direct", adapters(43))
    pair.a.answer("direct")
    direct = openai.OpenAI(base_url=f"{pair.a.engine_url}/v1", api_key="unused", max_retries=0)
    stream = direct.completions.create(
        model="direct", prompt=PROMPT, max_tokens=LONG, temperature=0, stream=True
    )
    pieces = [next(stream).choices[0].text]
    pair.b.http.post("/v1/unload_lora_adapter", json={"lora_name": "direct"}).raise_for_status()
    pair.wait_delisted("direct")
    looks = 0
    while True:
        held = "direct" in pair.a.engine_names()
        if metric(pair.a, "vllm:num_requests_running") == 0:
            break
        assert held
        looks += 1
    pieces.extend(chunk.choices[0].text for chunk in stream)
    assert looks, "the stream ended before anybody looked"
    assert len("".join(pieces)) > LONG
    wait_until("the engine lets go", lambda: "direct" not in pair.a.engine_names(), timeout_s=20)
