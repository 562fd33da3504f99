"""Launches: which numbers a kernel gets for a layer, a plan and a configuration.

The number of programs comes from the batch's rows and the number of slots, never from what a plan
holds: programs that have nothing to do find that out on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from lora_fs.kernels.gpu.configs import Expand, Shrink
from lora_fs.kernels.gpu.expand import expand_kernel
from lora_fs.kernels.gpu.plan import DevicePlan
from lora_fs.kernels.gpu.shrink import shrink_kernel
from lora_fs.kernels.weights.layout import Shape, ShapeError
from lora_fs.kernels.weights.tables import VECTOR_BYTES, Tables

# There tl.dot of bf16 gives nonsense (Triton 3.9).
INTERPRETED = not isinstance(shrink_kernel, triton.JITFunction)


@dataclass(frozen=True, slots=True)
class Planes:
    """The output of a split shrink, and the numbers that an expand needs to read it."""

    scratch: torch.Tensor | None
    config: Shrink
    programs: int
    most_parts: int
    inputs: int


# An embedding's, whose expand reads none.
NO_PLANES = Planes(None, Shrink(1, 1, 1, programs=1, most_splits=1), 1, 1, 1)


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
    _check_rows("x", x, plan, shape.inputs)
    if plan.tile_rows != config.rows:
        raise ShapeError(f"tiles of {plan.tile_rows} rows, and the configuration wants {config.rows}")
    parts = triton.cdiv(tables.capacity, config.ranks)
    programs = max(plan.tiles, min(config.programs, plan.tiles * parts * config.most_splits))
    # For as many tiles as there may be, the larger of a tile's share and its parts.
    pieces = max(programs, plan.tiles * parts)
    scratch = new_scratch(pieces * config.rows * config.ranks, x.device)
    early = config.early and not INTERPRETED
    shrink_kernel[(programs,)](
        scratch,
        x,
        plan.block,
        tables.weights,
        tables.offsets,
        tables.ends,
        shape.inputs,
        programs,
        parts,
        x.stride(0),
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
        INTERPRETED=INTERPRETED,
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
        **({"launch_pdl": True} if early else {}),  # HIP has no such option
    )
    return Planes(scratch, config, programs, parts, shape.inputs)


def expand(
    y: torch.Tensor,
    z: Planes | torch.Tensor,
    shape: Shape,
    tables: Tables,
    plan: DevicePlan,
    config: Expand,
    add: bool,
) -> None:
    """Expand what ``shrink_planes`` gave for the same plan, or the rows of A that tokens ``[T]`` name."""
    planes, tokens = (z, None) if isinstance(z, Planes) else (NO_PLANES, z)
    _check_rows("y", y, plan, shape.width)
    if plan.tile_rows % config.rows:
        raise ShapeError(f"tiles of {plan.tile_rows} rows have no whole pieces of {config.rows}")
    early = config.early and tokens is None and not INTERPRETED
    blocks = sum(triton.cdiv(width, config.columns) for width in shape.outputs)
    items = plan.tiles * (plan.tile_rows // config.rows) * blocks
    expand_kernel[(min(items, config.programs),)](
        y,
        planes.scratch,
        tokens,
        plan.block,
        tables.weights,
        tables.offsets,
        tables.ends,
        tables.scales,
        tables.columns,
        blocks,
        planes.inputs,
        planes.programs,
        planes.most_parts,
        y.stride(0),
        tables.offsets.stride(0),
        tables.ends.stride(0),
        tables.scales.stride(0),
        SLICES=len(shape.outputs),
        ROWS=config.rows,
        RANKS=config.ranks,
        COLUMNS=config.columns,
        TILE_ROWS=plan.tile_rows,
        PLANE_RANKS=planes.config.ranks,
        PLANE_INPUTS=planes.config.inputs,
        MOST_SPLITS=planes.config.most_splits,
        LOOKUP=tokens is not None,
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


def _check_rows(name: str, rows: torch.Tensor, plan: DevicePlan, width: int) -> None:
    """Raise ShapeError unless ``rows`` is the plan's batch, ``width`` wide, its columns side by side."""
    if rows.ndim != 2 or rows.shape[0] < plan.rows or rows.shape[1] != width:
        raise ShapeError(f"{name} is {tuple(rows.shape)}, and the plan and layer want [{plan.rows}, {width}]")
    if width > 1 and rows.stride(1) != 1:
        raise ShapeError(f"{name} has a stride of {rows.stride(1)} along its columns")
