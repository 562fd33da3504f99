"""Launches: which numbers a kernel gets for a layer, a plan and a configuration.

The number of programs comes from the batch's rows and the number of slots, never from what a plan
holds: programs that have nothing to do find that out on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from lora_fs.kernels.gpu.configs import Expand, Shrink
from lora_fs.kernels.gpu.expand import BATCH, PLANES, TOKENS, expand_kernel
from lora_fs.kernels.gpu.plan import DevicePlan
from lora_fs.kernels.gpu.shrink import shrink_kernel
from lora_fs.kernels.weights.layout import Shape, ShapeError
from lora_fs.kernels.weights.tables import VECTOR_BYTES, Tables

# There tl.dot of bf16 gives nonsense (Triton 3.9).
INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Planes:
    """The output of a split shrink, and the numbers that an expand needs to read it."""

    scratch: torch.Tensor
    config: Shrink
    programs: int
    most_parts: int
    inputs: int


def new_scratch(elements: int, device: torch.device) -> torch.Tensor:
    """Memory for planes, whatever stands in it."""
    return torch.empty(elements, dtype=torch.float32, device=device)


def shrink_planes(
    x: torch.Tensor, shape: Shape, tables: Tables, plan: DevicePlan, config: Shrink, *, next_early: bool
) -> Planes:
    """Shrink into planes, for ``expand_planes`` alone to read, which comes next.

    Args:
        next_early: ``early`` of the expand's configuration.
    """
    parts = triton.cdiv(tables.capacity, config.ranks)
    programs = max(plan.tiles, min(config.programs, plan.tiles * parts * config.most_splits))
    # For as many tiles as there may be, the larger of a tile's share and its parts.
    pieces = max(programs, plan.tiles * parts)
    scratch = new_scratch(pieces * config.rows * config.ranks, x.device)
    _shrink(scratch, x, shape, tables, plan, config, programs, direct=False, next_early=next_early)
    return Planes(scratch, config, programs, parts, shape.inputs)


def shrink_rows(
    z: torch.Tensor, x: torch.Tensor, shape: Shape, tables: Tables, plan: DevicePlan, config: Shrink
) -> None:
    """Shrink into ``z [T, R]``, fp32; rows without an adapter are left alone."""
    programs = plan.tiles * triton.cdiv(z.shape[1], config.ranks)
    _shrink(z, x, shape, tables, plan, config, programs, direct=True, next_early=False)


def expand_planes(
    y: torch.Tensor, planes: Planes, shape: Shape, tables: Tables, plan: DevicePlan, config: Expand, add: bool
) -> None:
    """Expand what ``shrink_planes`` gave for the same plan."""
    numbers = (planes.inputs, planes.programs, planes.most_parts)
    of_shrink = (planes.config.ranks, planes.config.inputs, planes.config.most_splits)
    _expand(y, planes.scratch, None, shape, tables, plan, config, PLANES, numbers, of_shrink, add)


def expand_rows(
    y: torch.Tensor,
    z: torch.Tensor,
    shape: Shape,
    tables: Tables,
    plan: DevicePlan,
    config: Expand,
    add: bool,
) -> None:
    """Expand ``z [T, R]``, fp32."""
    _expand(y, z, None, shape, tables, plan, config, BATCH, (1, 1, 1), (1, 1, 1), add)


def expand_tokens(
    y: torch.Tensor,
    tokens: torch.Tensor,
    shape: Shape,
    tables: Tables,
    plan: DevicePlan,
    config: Expand,
    add: bool,
) -> None:
    """Expand the rows of A that ``tokens [T]`` name."""
    _expand(y, None, tokens, shape, tables, plan, config, TOKENS, (1, 1, 1), (1, 1, 1), add)


def _shrink(
    z: torch.Tensor,
    x: torch.Tensor,
    shape: Shape,
    tables: Tables,
    plan: DevicePlan,
    config: Shrink,
    programs: int,
    *,
    direct: bool,
    next_early: bool,
) -> None:
    check_rows("x", x, plan, shape.inputs)
    if plan.tile_rows != config.rows:
        raise ShapeError(f"tiles of {plan.tile_rows} rows, and the configuration wants {config.rows}")
    early = config.early and not INTERPRETED
    shrink_kernel[(programs,)](
        z,
        x,
        plan.block,
        tables.weights,
        tables.offsets,
        tables.ends,
        shape.inputs,
        programs,
        triton.cdiv(tables.capacity, config.ranks),
        x.stride(0),
        z.stride(0),
        tables.offsets.stride(0),
        tables.ends.stride(0),
        SLICES=len(shape.outputs),
        ROWS=config.rows,
        RANKS=config.ranks,
        INPUTS=config.inputs,
        MOST_SPLITS=config.most_splits,
        EVEN=shape.inputs % config.inputs == 0,
        ALIGN=_align(tables),
        EARLY=early,
        NEXT_EARLY=next_early and not INTERPRETED,
        DIRECT=direct,
        INTERPRETED=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),  # HIP has no such option
    )


def _expand(
    y: torch.Tensor,
    z: torch.Tensor | None,
    tokens: torch.Tensor | None,
    shape: Shape,
    tables: Tables,
    plan: DevicePlan,
    config: Expand,
    source: Any,
    numbers: tuple[int, int, int],
    of_shrink: tuple[int, int, int],
    add: bool,
) -> None:
    check_rows("y", y, plan, shape.width)
    if plan.tile_rows % config.rows:
        raise ShapeError(f"tiles of {plan.tile_rows} rows have no whole pieces of {config.rows}")
    early = config.early and source is PLANES and not INTERPRETED
    blocks = sum(triton.cdiv(width, config.columns) for width in shape.outputs)
    items = plan.tiles * (plan.tile_rows // config.rows) * blocks
    expand_kernel[(min(items, config.programs),)](
        y,
        z,
        tokens,
        plan.block,
        tables.weights,
        tables.offsets,
        tables.ends,
        tables.scales,
        tables.columns,
        blocks,
        *numbers,
        y.stride(0),
        0 if z is None else z.stride(0),
        tables.offsets.stride(0),
        tables.ends.stride(0),
        tables.scales.stride(0),
        SLICES=len(shape.outputs),
        ROWS=config.rows,
        RANKS=config.ranks,
        COLUMNS=config.columns,
        TILE_ROWS=plan.tile_rows,
        PLANE_RANKS=of_shrink[0],
        PLANE_INPUTS=of_shrink[1],
        MOST_SPLITS=of_shrink[2],
        SOURCE=source.value,
        EARLY=early,
        ADD=add,
        EVEN=all(width % config.columns == 0 for width in shape.outputs),
        ALIGN=_align(tables),
        INTERPRETED=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),
    )


def _align(tables: Tables) -> int:
    return VECTOR_BYTES // tables.weights.itemsize if tables.aligned else 1


def check_rows(name: str, rows: torch.Tensor, plan: DevicePlan, width: int) -> None:
    """Raise ShapeError unless ``rows`` is the plan's batch, ``width`` wide, its columns side by side."""
    if rows.ndim != 2 or rows.shape[0] < plan.rows or rows.shape[1] != width:
        raise ShapeError(f"{name} is {tuple(rows.shape)}, and the plan and layer want [{plan.rows}, {width}]")
    if width > 1 and rows.stride(1) != 1:
        raise ShapeError(f"{name} has a stride of {rows.stride(1)} along its columns")
