"""Puts the managers and the worker's method in place. Every hook is in the ledger, docs/engine.md.

Run in every vLLM process before a worker is made; running it again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_fs.sidecar.settings import load_settings
from lora_fs.worker_patch.worker.put import put

RPC = "lora_fs"

_CPU = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
_GPU = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
_WRAPPERS = "lora_fs.worker_patch.worker.ops"


def install() -> None:
    """Hook this process's vLLM."""
    from vllm.lora import lora_model, model_manager, worker_manager
    from vllm.v1.worker import lora_model_runner_mixin
    from vllm.v1.worker.worker_base import WorkerBase

    from lora_fs.worker_patch.worker import ids
    from lora_fs.worker_patch.worker.load.patterns import keep_compiled
    from lora_fs.worker_patch.worker.managers import TieredWorkerManager
    from lora_fs.worker_patch.worker.rpc import answer

    def lora_fs(self: WorkerBase, call: str, ask: Mapping[str, Any]) -> dict[str, Any]:
        return answer(self, call, ask)

    # The mixin imported the class by name: both names have to lead to ours.
    put(worker_manager, "LRUCacheWorkerLoRAManager", TieredWorkerManager)
    put(lora_model_runner_mixin, "LRUCacheWorkerLoRAManager", TieredWorkerManager)
    # ``resident.Resident`` page-locks the packed slab, instead of one matrix at a time before packing.
    put(lora_model, "PIN_MEMORY", False)
    put(model_manager, "PIN_MEMORY", False)
    # ``worker_extension_cls`` would do the same, and is one per engine: it is the operator's.
    setattr(WorkerBase, RPC, lora_fs)
    ids.widen()
    keep_compiled()
    _choose_wrapper()


def _choose_wrapper() -> None:
    from vllm.platforms import current_platform

    ours = wrapper_for(current_platform.get_punica_wrapper(), load_settings().kernels)
    if ours is not None:
        put(type(current_platform), "get_punica_wrapper", classmethod(lambda cls: ours))


def wrapper_for(stock: str, kernels: str) -> str | None:
    """The wrapper of ours to use instead of ``stock``, by its qualified name; None: keep ``stock``."""
    if stock == _CPU and kernels != "off":
        return f"{_WRAPPERS}.on_device.Interpreted" if kernels == "triton" else f"{_WRAPPERS}.punica.OnCPU"
    # No vLLM has served with ours on a GPU yet: there, ``auto`` is vLLM's own.
    if stock == _GPU and kernels == "triton":
        return f"{_WRAPPERS}.on_device.OnGPU"
    return None
