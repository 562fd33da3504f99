"""A call of ``worker.rpc`` in every worker of every engine behind a client of vLLM's, and its answers."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.model import engine_name, public_of
from lora_fs.worker_patch.notices import End, Waiting
from lora_fs.worker_patch.worker.hooks import RPC

Answer = dict[str, Any]


async def ask_all(client: EngineClient, call: str, body: Mapping[str, Any]) -> list[Answer]:
    """Return every worker's answer, with the rank of its ``engine``.

    With data parallelism vLLM's own call gives one engine's.
    """
    core: Any = getattr(client, "engine_core", None)
    # vLLM's name of an engine is its rank in two bytes; calls and answers keep this order.
    ranks = [int.from_bytes(engine, "little") for engine in getattr(core, "core_engines", ())] or [0]
    if len(ranks) == 1:
        of_engines = [await client.collective_rpc(RPC, args=(call, body))]
    else:
        asked = ("collective_rpc", RPC, None, (call, body), None)
        of_engines = await asyncio.gather(
            *(core._call_utility_async(*asked, engine=engine) for engine in core.core_engines)
        )
    return [
        {**answer, "engine": str(rank)}
        for rank, answers in zip(ranks, of_engines, strict=True)
        for answer in answers
    ]


def admission(answers: Iterable[Answer]) -> Answer | None:
    """Return what the next ``load`` is to admit, once no worker is without its share; None before.

    Each counts as much as the largest share takes. So all workers evict the same adapters.
    """
    loaded = [answer for answer in answers if answer["state"] != "ready"]
    if not loaded or any(answer["state"] != "loaded" for answer in loaded):
        return None
    numbers = sorted({answer["load"] for answer in loaded})
    return {"loads": numbers, "bytes": max(answer["bytes"] for answer in loaded)}


def end_of(answer: Answer) -> End:
    """Return which end of a load a worker's answer waits for."""
    return answer["load"], answer["from"]


def heard(answer: Answer, waiting: Waiting) -> Answer:
    """Return what a worker that was loading answers once its load has ended."""
    size_bytes = waiting.ended.get(end_of(answer)) if answer["state"] == "loading" else None
    return answer if size_bytes is None else {**answer, "state": "loaded", "bytes": size_bytes}


def request_for(name: str, adapter: int, path: str, blank_runs: Mapping[int, int]) -> LoRARequest:
    """Make vLLM's request for an adapter, by the engine's name and, after each blank run, by another one.

    vLLM keeps the prefix blocks of a blank run under the name that its requests had: no later request of the
    adapter may be answered from them, also if another API server has loaded it anew.
    """
    if runs := blank_runs.get(adapter, 0):
        name = engine_name(public_of(name), hashlib.sha256(f"{name} {runs}".encode()).hexdigest())
    return LoRARequest(name, adapter, path)
