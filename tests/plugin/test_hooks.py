"""Which wrapper computes the adapters, by platform and setting."""

from __future__ import annotations

import pytest
from vllm.lora import lora_model, model_manager, worker_manager
from vllm.lora.peft_helper import PEFTHelper
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker import lora_model_runner_mixin
from vllm.v1.worker.worker_base import WorkerBase

from lora_fs.worker_patch.worker import hooks
from lora_fs.worker_patch.worker.hooks import wrapper_for
from lora_fs.worker_patch.worker.load.patterns import match
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.ops.punica import Planned

CPU = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
GPU = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"
XPU = "vllm.lora.punica_wrapper.punica_xpu.PunicaWrapperXPU"


@pytest.mark.parametrize(
    ("stock", "kernels", "ours"),
    [
        (CPU, "auto", "punica.OnCPU"),
        (CPU, "torch", "punica.OnCPU"),
        (CPU, "mine", "punica.OnCPU"),
        (CPU, "triton", "on_device.Interpreted"),
        (GPU, "triton", "on_device.OnGPU"),
    ],
)
def test_ours(stock: str, kernels: str, ours: str) -> None:
    """Each name is a class that stands in for the platform's own."""
    name = wrapper_for(stock, kernels)
    assert name == f"lora_fs.worker_patch.worker.ops.{ours}"
    found = resolve_obj_by_qualname(name)
    assert issubclass(found, Planned)
    assert issubclass(found, resolve_obj_by_qualname(stock))


@pytest.mark.parametrize(
    ("stock", "kernels"),
    [(CPU, "off"), (GPU, "off"), (GPU, "auto"), (GPU, "torch"), (XPU, "auto"), (XPU, "triton")],
)
def test_vllms_own(stock: str, kernels: str) -> None:
    """Off, and what was not measured or does not fit."""
    assert wrapper_for(stock, kernels) is None


def test_what_is_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our manager under both names, the worker's method, and how files are read."""
    named = (worker_manager, lora_model_runner_mixin)
    for module in named:
        monkeypatch.setattr(module, "LRUCacheWorkerLoRAManager", object)
    for module in (lora_model, model_manager):
        monkeypatch.setattr(module, "PIN_MEMORY", True)
    monkeypatch.setattr(WorkerBase, hooks.RPC, None, raising=False)
    monkeypatch.setattr(hooks, "_choose_wrapper", lambda: None)
    monkeypatch.setattr(PEFTHelper, "_match_pattern", None, raising=False)
    hooks.install()
    assert [module.LRUCacheWorkerLoRAManager for module in named] == [TieredWorkerManager] * 2
    assert [lora_model.PIN_MEMORY, model_manager.PIN_MEMORY] == [False, False]
    assert callable(getattr(WorkerBase, hooks.RPC))
    assert PEFTHelper._match_pattern is match
