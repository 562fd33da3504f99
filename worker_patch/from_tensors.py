"""Serve adapters from memory, for programs that run vLLM in their own process: reinforcement learning.

Tensors become the two files of an adapter in memory. These take the way of a registered folder:
the same findings, the same digest, the same load beside the steps. They are removed when every worker
has packed them. Only ``register`` writes to the volume.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, NoSpareRoom
from lora_fs.worker_patch.api.calls import Answer, admission, ask_all
from lora_fs.worker_patch.api.in_memory import Adapter, Config, files_of, judge
from lora_fs.worker_patch.worker.hooks import RPC

if TYPE_CHECKING:
    import torch
    from vllm import LLM
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

USER = "/memory"  # who holds these adapters in the workers; no replica's id, which is a segment
TIMEOUT_S = 120.0
LOOK_S = 0.005
WAIT_S = 1.0  # for so long a worker waits for a load at each look, where the program waits for it, too
NOTHING_ALLOWED: frozenset[str] = frozenset()

Calls = Generator[tuple[str, dict[str, Any]], list[Answer], None]


def load_lora_adapter_from_tensors(
    llm: LLM,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Config,
    *,
    allow: frozenset[str] = NOTHING_ALLOWED,
    register: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> LoRARequest:
    """Load an adapter into an engine; returns the ``lora_request`` of its requests.

    It stays in host memory until ``unload_lora_adapter``. The same name with other tensors is another
    revision: both answer until one is unloaded. With the same tensors it is one adapter, and one unload
    removes it.

    Args:
        tensors: as in PEFT's file, on any device.
        config: PEFT's configuration, or the contents of ``adapter_config.json``.
        allow: codes of findings to take as warnings.
        register: also register it in ``LORA_FS_ROOT``, as the next revision of ``name``.
        timeout_s: seconds that the load may take.
    Raises:
        InputError: the engine has no lora-fs, or these are no tensors. InvalidAdapter: carries the findings.
        EngineRejected: it does not fit the model. NoSpareRoom: all of ``LORA_FS_HOST_BYTES`` is in use.
        EngineUnavailable: no answer in time.
    """
    with files_of(tensors, config) as folder:
        adapter = judge(folder, llm.llm_engine.vllm_config, name, allow=allow, register=register)
        _ask(llm, _load(adapter, folder, timeout_s, WAIT_S))
        return _request(adapter, folder)


async def load_lora_adapter_from_tensors_async(
    llm: AsyncLLM,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    config: Config,
    *,
    allow: frozenset[str] = NOTHING_ALLOWED,
    register: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> LoRARequest:
    """Do what ``load_lora_adapter_from_tensors`` does while the engine serves: no step waits for it."""
    with ExitStack() as stack:
        folder = await asyncio.to_thread(stack.enter_context, files_of(tensors, config))
        judging = partial(judge, folder, llm.vllm_config, name, allow=allow, register=register)
        adapter = await asyncio.to_thread(judging)
        await _ask_async(llm, _load(adapter, folder, timeout_s, 0))
        return _request(adapter, folder)


def unload_lora_adapter(llm: LLM, request: LoRARequest) -> None:
    """Unload an adapter that came from tensors, once its requests have ended."""
    _ask(llm, _drop(request.lora_int_id))


async def unload_lora_adapter_async(llm: AsyncLLM, request: LoRARequest) -> None:
    """Do what ``unload_lora_adapter`` does while the engine serves."""
    await _ask_async(llm, _drop(request.lora_int_id))


def _request(adapter: Adapter, folder: Path) -> LoRARequest:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.engine_name, adapter.identity, str(folder))


def _load(adapter: Adapter, folder: Path, timeout_s: float, wait_s: float) -> Calls:
    """Poll until every worker has the adapter. If that fails or is cancelled, each worker drops it."""
    until = time.monotonic() + timeout_s
    ask = {
        "id": adapter.identity,
        "name": adapter.public,
        "path": str(folder),
        "size_bytes": adapter.size_bytes,
        "dtype": adapter.dtype,
        "priority": 0,
        "pinned": False,
        "user": USER,
        "sequence": 1,
        "spare": False,
        "again": True,
        "wait_s": wait_s,
        "passing": True,
    }
    try:
        while True:
            answers = yield "load", ask
            states = {answer["state"]: answer["reason"] for answer in answers}
            if states.keys() == {"ready"}:
                return
            if "failed" in states:
                reason = states["failed"].replace(str(folder), "it")
                raise EngineRejected(f"the engine cannot load {adapter.public}: {reason}", reason=reason)
            if "full" in states:
                raise NoSpareRoom(
                    f"no room in host memory for {adapter.public}: {states['full']}: unload another"
                )
            if time.monotonic() > until:
                raise EngineUnavailable(f"the engine has not loaded {adapter.public} in {timeout_s:.0f} s")
            ask = {**ask, "again": False, "admit": admission(answers)}
    except (Exception, asyncio.CancelledError):
        with suppress(Exception):  # of a dead engine the first error tells more
            yield from _drop(adapter.identity)
        raise


def _drop(identity: int) -> Calls:
    yield "drop", {"id": identity, "user": USER}


def _ask(llm: LLM, calls: Calls) -> None:
    with suppress(StopIteration):
        call, ask = next(calls)
        while True:
            try:
                answers = _checked(llm.collective_rpc(RPC, args=(call, ask)))
            except Exception as error:
                call, ask = calls.throw(error)
            else:
                call, ask = calls.send(answers)


async def _ask_async(llm: AsyncLLM, calls: Calls) -> None:
    wait_s = 0.0
    with suppress(StopIteration):
        call, ask = next(calls)
        while True:
            try:
                await asyncio.sleep(wait_s)
                answers = _checked(await ask_all(llm, call, ask))
            except (Exception, asyncio.CancelledError) as error:
                call, ask = calls.throw(error)
            else:
                call, ask = calls.send(answers)
            wait_s = LOOK_S


def _checked(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        if "error" in answer:
            raise EngineUnavailable(f"the engine did not do it: {answer['error']}")
    return answers
