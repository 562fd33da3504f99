"""The wrappers for kernels that read a step's plan from the device: on a GPU, and in Triton's interpreter.

Each step uploads the plan into buffers that stay where they are, so that captured CUDA graphs
replay with it. Operations of torch's reach layers inside the compiled model by name.
Source: vllm/lora/punica_wrapper/punica_gpu.py, 0.32.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu.plan import SMALL_ROWS, DevicePlan, tiles_of
from lora_fs.worker_patch.worker.ops import opaque
from lora_fs.worker_patch.worker.ops.punica import NOBODY, OnCPU, Planned
from lora_fs.worker_patch.worker.slots.layers import Target

_numbers = count()  # of this process's wrappers: the same whenever an engine starts


class OnDevice(Planned):
    """Plans on the device, beside those on the host.

    Attributes:
        named: whether the step names an adapter, in a slot or not: else no layer launches anything.
    """

    named = False

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._number = next(_numbers)
        self._sizes = (max_num_batched_tokens, kwargs["lora_config"].max_loras, device)

    def prepare(self, rows: torch.dtype, captured: int = 0) -> frozenset[torch.dtype]:
        small, self._rows = max(SMALL_ROWS, captured), rows
        self.tokens_there = DevicePlan(*self._sizes, small)
        self.sampled_there = self._sampled_apart = DevicePlan(*self._sizes, small)
        return super().prepare(rows, captured)

    def update_metadata(self, mapping: Any, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(mapping, *args, **kwargs)
        ids = mapping.index_mapping
        self.named = len(self.tokens.table) > 0 or ids.count(0) < len(ids)
        self.tokens_there.upload(self.tokens)
        if self.sampled is self.tokens:  # a step that only decodes
            self.sampled_there = self.tokens_there
        else:
            self.sampled_there = self._sampled_apart
            self.sampled_there.upload(self.sampled)

    def bind(self, path: str, target: Target) -> Any:
        # What torch.compile keeps for the next start has the name in it.
        name = f"{self._number}.{path}"
        opaque.bind(name, target.layer, self.tokens_there, lambda: self.named)
        return BoundByName(self, target, name)

    def warm(self, targets: Iterable[Target]) -> None:
        """Compile what steps will launch, whatever their sizes: a step that compiles takes seconds."""
        plan = self.tokens_there
        alike = {target.shape: target for target in targets}
        for tile in tiles_of(plan.capacity, plan.small_rows):
            plan.upload(NOBODY, 1, tile)
            for target in alike.values():
                rows = {"dtype": self._rows, "device": plan.block.device}
                y = torch.zeros(1, target.shape.width, **rows)
                if target.shape.lookup:
                    tokens = torch.zeros(1, dtype=torch.int64, device=plan.block.device)
                    gpu.embedding(y, tokens, target.layer, plan)
                else:
                    gpu.linear(y, torch.zeros(1, target.shape.inputs, **rows), target.layer, plan)
        plan.upload(NOBODY)


class BoundByName:
    """A wrapper as one layer sees it, whatever stream or graph the layer runs in."""

    def __init__(self, wrapper: OnDevice, target: Target, name: str) -> None:
        self._wrapper, self._target, self._name = wrapper, target, opaque.encode(name)

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, *args: Any, add_inputs: bool = True, **kwargs: Any
    ) -> None:
        """Add each row's delta to ``y [T, N]``, or put it there."""
        torch.ops.lora_fs.linear(y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1]), self._name, add_inputs)

    def add_embedding(self, y: torch.Tensor, tokens: torch.Tensor) -> None:
        """What ``layers`` calls in the place of vLLM's embedding."""
        torch.ops.lora_fs.embedding(y.view(-1, y.shape[-1]), tokens.view(-1), self._name, True)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Outside the compiled model; ``y`` may be padded on its right."""
        x, y = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]).narrow(1, 0, self._target.shape.width)
        host = self._wrapper.plan_of_logits(x.shape[0])
        plan: Any = self._wrapper.sampled_there if host is self._wrapper.sampled else host
        if self._wrapper.named:
            self._wrapper.ops.linear(y, x, self._target.layer, plan)


class OnGPU(OnDevice, PunicaWrapperGPU):  # type: ignore[misc]
    """On CUDA. The operations ran on a GPU; a vLLM with this wrapper not yet."""


class Interpreted(OnDevice, OnCPU, PunicaWrapperCPU):  # type: ignore[misc]
    """The same on a CPU, for tests: set ``TRITON_INTERPRET=1``."""
