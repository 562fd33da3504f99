"""The operations for GPUs, in Triton: ``reference`` says what each computes.

A linear is two launches and an embedding one, whatever the adapters and their ranks. A launch
reads on the device what it computes, from the plan's block and the layer's tables. So a captured CUDA
graph replays with other adapters, batches and ranks: capture ``linear`` and ``embedding`` of an
``Arena``'s layer with a ``DevicePlan``. A plain plan or layer is brought to the device for one call.
"""

from __future__ import annotations

from functools import cache

import torch

from lora_fs.kernels.gpu import launch
from lora_fs.kernels.gpu.configs import SHARED_BYTES, Expand, Shrink, configs_for
from lora_fs.kernels.gpu.plan import DevicePlan, on_device
from lora_fs.kernels.segments import Plan
from lora_fs.kernels.weights.layout import Layer
from lora_fs.kernels.weights.tables import DeviceLayer, Tables, tables_of

__all__ = ["DevicePlan", "embedding", "linear"]


def linear(
    y: torch.Tensor,
    x: torch.Tensor,
    layer: Layer,
    plan: Plan | DevicePlan,
    *,
    add: bool = True,
    configs: tuple[Shrink, Expand] | None = None,
) -> None:
    """See ``reference.linear``.

    Args:
        configs: instead of those that suit the batch and the layer, for tuning and tests; the
            shrink's rows are those of the plan's tiles, and the expand's divide them.
    """
    if not y.numel() or _blank(layer):
        return
    plan, tables = on_device(plan, y.device), tables_of(layer)
    shrinking, expanding = configs or _configs(layer, tables, plan)
    planes = launch.shrink_planes(x, layer.shape, tables, plan, shrinking, next_early=expanding.early)
    launch.expand(y, planes, layer.shape, tables, plan, expanding, add)


def embedding(
    y: torch.Tensor, tokens: torch.Tensor, layer: Layer, plan: Plan | DevicePlan, *, add: bool = True
) -> None:
    """See ``reference.embedding``."""
    if not y.numel() or _blank(layer):
        return
    plan, tables = on_device(plan, y.device), tables_of(layer)
    launch.expand(y, tokens, layer.shape, tables, plan, _configs(layer, tables, plan)[1], add)


def _blank(layer: Layer) -> bool:
    """Whether no replay of this call can ever have work."""
    return not isinstance(layer, DeviceLayer) and layer.widest == 0


def _configs(layer: Layer, tables: Tables, plan: DevicePlan) -> tuple[Shrink, Expand]:
    weights = tables.weights
    device = weights.device
    sizes = (layer.shape, plan.tile_rows, tables.capacity, weights.dtype)
    return configs_for(*sizes, _processors(device), shared_bytes(device), _launches_early(device))


@cache
def _processors(device: torch.device) -> int:
    """The multiprocessors of a GPU; in the interpreter few, which is all the same to its results."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 2


@cache
def _launches_early(device: torch.device) -> bool:
    """Whether a GPU can launch a kernel before the one before it has ended: NVIDIA's, from Hopper on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return bool(torch.cuda.get_device_capability(device) >= (9, 0))


@cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory that a program may have on a GPU."""
    if device.type != "cuda":
        return SHARED_BYTES
    told = torch.cuda.get_device_properties(device)
    # HIP's have one size alone.
    return int(getattr(told, "shared_memory_per_block_optin", told.shared_memory_per_block))
