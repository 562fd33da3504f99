"""vLLM is imported here once, with the warnings that are its own and torch's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.entrypoints.openai.models.serving
    import vllm.lora.worker_manager
    import vllm.v1.worker.lora_model_runner_mixin  # noqa: F401
    from vllm.config.lora import LoRAConfig
    from vllm.platforms import current_platform

    from lora_fs.worker_patch.worker.hooks import wrapper_for
    from lora_fs.worker_patch.worker.models import TieredModelManager
    from lora_fs.worker_patch.worker.ops import opaque
    from tests.plugin.block import SLOTS, STOCK, WORDS, Make, Model, vllm_config
    from tests.plugin.tensor_parallel import be_rank


@pytest.fixture(autouse=True)
def usual_switches() -> Iterator[None]:
    """Of two workers in one process each takes the other's interval for the usual one."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """A manager with a model; no adapter has room in its host tier before its budget is set."""
    monkeypatch.setattr(opaque, "_bound", {})
    monkeypatch.setenv("LORA_FS_HOST_BYTES", "0")
    be_rank(monkeypatch, 0, 1)

    def manager(
        kernels: str,
        rank: int = 0,
        size: int = 1,
        *,
        config: Any = None,
        model: Callable[[], Model] = Model,
        wrapper: str | None = None,
        fully_sharded: bool = False,
        target_modules: list[str] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> TieredModelManager:
        monkeypatch.setenv("LORA_FS_KERNELS", kernels)
        be_rank(monkeypatch, rank, size)
        ours = wrapper or wrapper_for(STOCK, kernels) or STOCK
        monkeypatch.setattr(current_platform, "get_punica_wrapper", lambda: ours)
        lora_config = LoRAConfig(
            max_lora_rank=16,
            max_loras=SLOTS,
            lora_dtype=dtype,
            fully_sharded_loras=fully_sharded,
            target_modules=target_modules,
        )
        device, config = torch.device("cpu"), config or vllm_config()
        return TieredModelManager(model(), 8, 2048, WORDS, lora_config, device, vllm_config=config)

    return manager
