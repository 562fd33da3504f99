"""The ways to add a layer's LoRA product that are compared: ours, vLLM's, SGLang's; from what is installed.

Every way has its own copy of the same weights for each layer copy, in the layout that it wants, and
works on the same x and y. What a step prepares once (plan, metadata, routes) is made before, and is
not in a call. A peer that cannot be had says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import torch
from grid import PREFILL_TOKENS, Case, moved_bytes, ranks_of, slots_of
from numpy.typing import NDArray

from lora_fs.kernels import gpu
from lora_fs.kernels.gpu.configs import Expand, Shrink
from lora_fs.kernels.memory.arena import Arena
from lora_fs.kernels.segments import NO_SLOT, Plan, plan_rows
from lora_fs.kernels.weights.layout import Layer, Shape, pack
from lora_fs.kernels.weights.slabs import ALIGN_BYTES, Weights, pack_slab

COPIES = 32
# What copies have to move together, so that no cache holds it: twice an H100's largest.
CACHED_BYTES = 100 << 20
MOST_COPIES = 256
# A copy that moves more than this is not found in any cache again: fewer do.
LARGE_BYTES = 256 << 20
LARGE_COPIES_BYTES = 8 << 30

# Adds the product of one layer copy to its y.
Call = Callable[[int], None]
Configs = tuple[Shrink, Expand]


@dataclass(frozen=True, slots=True)
class Work:
    """One module of a case on a device.

    Attributes:
        adapters: of the first slots; each slice ``[r, K]`` and ``[N, r]``.
        x, y: ``[T, K]`` and ``[T, N]`` of each copy.
    """

    case: Case
    shape: Shape
    slots: NDArray[np.int64]
    adapters: list[Weights]
    x: list[torch.Tensor]
    y: list[torch.Tensor]

    @property
    def device(self) -> torch.device:
        return self.x[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.x[0].dtype

    @property
    def plan(self) -> Plan:
        return plan_rows(self.slots)

    def layer(self) -> Layer:
        """What the reference takes."""
        layer = Layer.empty(self.shape, self.case.max_loras)
        for slot, adapter in enumerate(self.adapters):
            layer.put(slot, pack(self.shape, adapter.a, adapter.b, adapter.scale))
        return layer


def make_work(
    case: Case, shape: Shape, device: torch.device, dtype: torch.dtype, copies: int | None = None
) -> Work:
    """Make weights and rows, the same numbers every time and in every copy.

    Args:
        copies: else so many that no cache holds what they move.
    """
    if copies is None:
        size = moved_bytes(shape, case)
        copies = max(COPIES, min(MOST_COPIES, -(-CACHED_BYTES // size)))
        if size > LARGE_BYTES:
            copies = max(4, min(COPIES, LARGE_COPIES_BYTES // size))
    random = torch.Generator(device).manual_seed(0)

    def draw(rows: int, columns: int, size: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random, device=device) * size).to(dtype)

    adapters = [
        Weights(
            [draw(rank, shape.inputs, shape.inputs**-0.5) for _ in shape.outputs],
            [draw(width, rank, rank**-0.5) for width in shape.outputs],
        )
        for rank in ranks_of(case)
    ]
    x, y = draw(case.tokens, shape.inputs, 1.0), draw(case.tokens, shape.width, 1.0)
    rows = [x, *(x.clone() for _ in range(copies - 1))], [y, *(y.clone() for _ in range(copies - 1))]
    return Work(case, shape, slots_of(case), adapters, *rows)


def in_arena(work: Work) -> list[Layer]:
    """A layer for each copy, all in one arena."""
    case, slices = work.case, len(work.shape.outputs)
    shapes = {str(copy): work.shape for copy in range(len(work.x))}
    of_rank = slices * work.shape.inputs + work.shape.width
    padding = (1 + slices) * ALIGN_BYTES * len(work.adapters)
    size = (sum(ranks_of(case)) * of_rank * work.dtype.itemsize + padding) * len(shapes)
    arena = Arena(shapes, case.max_loras, size + ALIGN_BYTES, case.max_rank, work.dtype, work.device)
    for slot, adapter in enumerate(work.adapters):
        with work.device:
            slab = pack_slab(shapes, dict.fromkeys(shapes, adapter), work.dtype)
        slab = replace(slab, row=slab.row.cpu())
        if work.device.type == "cuda":
            # The arena copies on a stream of its own, which does not wait for packing on this one.
            torch.cuda.synchronize(work.device)
        arena.load(slot, slab)
    return [arena.layer(name) for name in shapes]


def plan_of(work: Work, tile: int | None = None) -> gpu.DevicePlan:
    """The plan on the device.

    Args:
        tile: rows of one, instead of those that a step would have.
    """
    plan = gpu.DevicePlan(work.case.tokens, work.case.max_loras, work.device)
    plan.upload(work.plan, tile=tile)
    return plan


def ours(work: Work, layers: Sequence[Layer], plan: gpu.DevicePlan, configs: Configs | None = None) -> Call:
    """Layers in an arena, and a plan on the device.

    Args:
        configs: instead of those that a step would have; of the plan's tiles.
    """

    def call(copy: int) -> None:
        gpu.linear(work.y[copy], work.x[copy], layers[copy], plan, configs=configs)

    return call


def vllm(work: Work) -> Call:
    """vLLM's own wrapper for GPUs: a buffer, shrink, expand."""
    from vllm.lora.ops.triton_ops import utils
    from vllm.lora.punica_wrapper.punica_gpu import PunicaWrapperGPU

    # They keep strides by address, for ever; another case's weights may stand where this one's did.
    utils._LORA_A_PTR_DICT.clear()
    utils._LORA_B_PTR_DICT.clear()
    case, tokens = work.case, work.case.tokens
    config = SimpleNamespace(max_loras=case.max_loras, specialize_active_lora=False)
    wrapper = PunicaWrapperGPU(tokens, tokens, work.device, lora_config=config)
    wrapper.token_mapping_meta.prepare_tensors(torch.from_numpy(work.slots).to(work.device))
    weights = [_padded(work) for _ in work.x]

    def call(copy: int) -> None:
        a, b = weights[copy]
        wrapper.add_lora_linear(work.y[copy], work.x[copy], a, b, 1.0, work.shape.outputs)

    return call


def _padded(work: Work) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """vLLM's stacks: for each slice ``[slots, 1, max_rank, K]`` and ``[slots, 1, N, max_rank]``."""
    slots, most = work.case.max_loras, work.case.max_rank
    zeros = {"dtype": work.dtype, "device": work.device}
    a = tuple(torch.zeros(slots, 1, most, work.shape.inputs, **zeros) for _ in work.shape.outputs)
    b = tuple(torch.zeros(slots, 1, width, most, **zeros) for width in work.shape.outputs)
    for slot, adapter in enumerate(work.adapters):
        for into_a, into_b, of_a, of_b in zip(a, b, adapter.a, adapter.b, strict=True):
            assert of_a is not None
            assert of_b is not None
            into_a[slot, 0, : of_a.shape[0]] = of_a
            into_b[slot, 0, :, : of_b.shape[1]] = of_b
    return a, b


@dataclass(frozen=True, slots=True)
class Stacks:
    """SGLang's weights: ``[slots, S · max_rank, K]``, a rank-r slot's slices one after the other from
    row 0 on, r rows each; and ``[slots, N, max_rank]``. The last slot has rank 0, for bare rows.
    """

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    ranks: torch.Tensor
    scales: torch.Tensor


def make_stacks(work: Work) -> Stacks:
    """SGLang's weights of each copy; its ways share them."""
    slots, most, slices = work.case.max_loras + 1, work.case.max_rank, len(work.shape.outputs)
    a = torch.zeros(slots, slices * most, work.shape.inputs, dtype=work.dtype, device=work.device)
    b = torch.zeros(slots, work.shape.width, most, dtype=work.dtype, device=work.device)
    ranks = torch.zeros(slots, dtype=torch.int32)
    for slot, (adapter, rank) in enumerate(zip(work.adapters, ranks_of(work.case), strict=True)):
        ranks[slot] = rank
        a[slot, : slices * rank] = torch.cat(list(adapter.a))
        b[slot, :, :rank] = torch.cat(list(adapter.b))
    copies = range(len(work.x) - 1)
    scales = torch.ones(slots, device=work.device)
    return Stacks(
        [a, *(a.clone() for _ in copies)], [b, *(b.clone() for _ in copies)], ranks.to(work.device), scales
    )


def chunks_of(
    slots: NDArray[np.int64], bare: int, chunk: int
) -> tuple[NDArray[np.int32], list[int], list[int]]:
    """csgmv's segments: rows sorted by slot, in pieces of up to ``chunk`` rows.

    Args:
        bare: the slot that rows without an adapter take.
    Returns:
        the rows in order, each piece's slot, and where pieces begin and end among the rows.
    """
    named = np.where(slots == NO_SLOT, bare, slots)
    order = np.argsort(named, kind="stable").astype(np.int32)
    of_pieces, ends = [], [0]
    for slot, rows in zip(*np.unique(named, return_counts=True), strict=True):
        for begin in range(0, int(rows), chunk):
            of_pieces.append(int(slot))
            ends.append(ends[-1] + min(chunk, int(rows) - begin))
    return order, of_pieces, ends


def csgmv(work: Work, stacks: Stacks, chunk: int = 16) -> Call:
    """SGLang's default, whose pieces have 16 rows unless it is told otherwise; an exact grid."""
    from sglang.kernels.ops.lora.dense.chunked_sgmv_expand import chunked_sgmv_lora_expand_forward
    from sglang.kernels.ops.lora.dense.chunked_sgmv_shrink import chunked_sgmv_lora_shrink_forward
    from sglang.srt.lora.utils import LoRABatchInfo

    order, of_pieces, ends = chunks_of(work.slots, work.case.max_loras, chunk)
    whole = {"dtype": torch.int32, "device": work.device}
    batch = LoRABatchInfo(
        use_cuda_graph=False,
        bs=work.case.tokens,
        num_segments=len(of_pieces),
        seg_indptr=torch.tensor(ends, **whole),
        weight_indices=torch.tensor(of_pieces, **whole),
        lora_ranks=stacks.ranks,
        scalings=stacks.scales,
        max_len=chunk,
        seg_lens=None,
        permutation=torch.from_numpy(order).to(work.device),
    )
    offsets = torch.tensor([0, *accumulate(work.shape.outputs)], dtype=torch.int32)
    there = offsets.to(work.device)

    def call(copy: int) -> None:
        z = chunked_sgmv_lora_shrink_forward(
            x=work.x[copy], weights=stacks.a[copy], batch_info=batch, num_slices=len(work.shape.outputs)
        )
        chunked_sgmv_lora_expand_forward(
            x=z,
            weights=stacks.b[copy],
            batch_info=batch,
            slice_offsets=there,
            slice_offsets_cpu=offsets,
            max_slice_size=max(work.shape.outputs),
            base_output=work.y[copy],
        )

    return call


def triton_v2(work: Work, stacks: Stacks) -> Call:
    """SGLang's opt-in backend with the plans it has for the device; alone, with no product to overlap."""
    from sglang.srt.lora.dense.plan import DenseLoraKind
    from sglang.srt.lora.dense.runner import DenseLoraRunner
    from sglang.srt.lora.utils import Phase
    from sglang.srt.lora.workspace import LoraWorkspace

    slots, offsets = len(stacks.ranks), (0, *accumulate(work.shape.outputs))
    runner = DenseLoraRunner(LoraWorkspace(), max_loras=slots, device=work.device)
    runner.begin_batch(
        token_slots=torch.from_numpy(work.slots.astype(np.int32)).to(work.device),
        lora_ranks=stacks.ranks,
        scalings=stacks.scales,
        num_tokens=work.case.tokens,
        phase=Phase.PREFILL if work.case.tokens >= PREFILL_TOKENS else Phase.DECODE,
        graph_mode=True,
    )
    plan = runner.plan_for(
        DenseLoraKind.LINEAR,
        work.case.max_rank,
        work.shape.inputs,
        work.shape.width,
        num_tokens=work.case.tokens,
    )

    def call(copy: int) -> None:
        bridge = runner.run_a(work.x[copy], stacks.a[copy], stack=len(work.shape.outputs), plan=plan)
        runner.run_b(bridge, stacks.b[copy], work.y[copy], offsets=offsets, plan=plan)

    return call


def missing() -> dict[str, str]:
    """The peers that cannot be had here, and why."""
    found = {}
    for peer, probe in {"vllm": _probe_vllm, "sglang": _probe_sglang}.items():
        try:
            probe()
        except Exception as error:
            # Whatever their imports raise is a reason to go without them.
            found[peer] = f"{type(error).__name__}: {error}"
    return found


def _probe_vllm() -> None:
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        raise ImportError("this build of vLLM goes without Triton")
    from vllm.lora.punica_wrapper import punica_gpu  # noqa: F401


def _probe_sglang() -> None:
    from sglang.kernels.ops.lora.dense import chunked_sgmv_expand, chunked_sgmv_shrink  # noqa: F401
    from sglang.srt.lora.dense import runner  # noqa: F401


def ways(work: Work, without: dict[str, str]) -> dict[str, Call | str]:
    """Every way to do the work by name, or why it cannot be made."""
    builders: dict[str, Callable[[], Call]] = {"ours": lambda: ours(work, in_arena(work), plan_of(work))}
    if "vllm" not in without:
        builders["vllm"] = lambda: vllm(work)
    if "sglang" not in without:
        stacks = make_stacks(work)
        builders["csgmv"] = lambda: csgmv(work, stacks)
        if work.case.tokens >= 64:
            # What it takes with --max-lora-chunk-size 128.
            chunk = 128 if work.case.tokens >= 256 else 32
            builders["csgmv tuned"] = lambda: csgmv(work, stacks, chunk)
        builders["triton_v2"] = lambda: triton_v2(work, stacks)
    made: dict[str, Call | str] = {}
    for name, build in builders.items():
        try:
            made[name] = build()
        except Exception as error:
            made[name] = f"{type(error).__name__}: {error}"
    return made
