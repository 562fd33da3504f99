"""What the GPU kernels are measured on, the least that each case can take, and what is predicted.

Numbers alone: nothing here needs a GPU, torch or a peer. A *floor* is the bytes that have to move,
once, over the device's bandwidth: weights of the ranks that adapters have, x, and y read and written,
of rows that have an adapter. A *prediction* is that plus what launches are thought to cost; it is an
estimate and never stands for a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lora_fs.kernels.segments import NO_SLOT
from lora_fs.kernels.weights.layout import Shape

MODELS: dict[str, dict[str, Shape]] = {
    # Llama-3.1: 32 heads of 128, 8 of k and v; 70B has 64 and 8, cut for four engines.
    "8B": {
        "qkv": Shape(4096, (4096, 1024, 1024)),
        "o": Shape(4096, (4096,)),
        "gate_up": Shape(4096, (14336, 14336)),
        "down": Shape(14336, (4096,)),
    },
    "70B/TP4": {
        "qkv": Shape(8192, (2048, 256, 256)),
        "o": Shape(2048, (8192,)),
        "gate_up": Shape(8192, (7168, 7168)),
        "down": Shape(7168, (8192,)),
    },
}
MIX = (8, 16, 32, 64, 128)
PREFILL_TOKENS = 1024
ITEM_BYTES = 2  # bf16

# TB/s that a copy is given on each, for predictions and floors where none is measured.
GIVEN_BANDWIDTH = {"H100": 3.0e12, "H200": 4.3e12}
# The launch-cost model. Estimates, all of them: a module's fixed cost in a CUDA graph, beside which
# bytes move at a share of the copy bandwidth.
TWO_LAUNCHES_US = 5.5
TWO_LAUNCHES_EARLY_US = 4.5  # the second launched while the first still runs
FUSED_LAUNCH_US = 3.0
SHARE_OF_BANDWIDTH = 0.85


@dataclass(frozen=True, slots=True)
class Case:
    """A batch on a layer of a model.

    Attributes:
        ranks: a number, or ``mix``: 8, 16, 32, 64 and 128 in turns.
        max_rank: what the peers pad to.
        max_loras: slots, of which the first ``adapters`` are loaded.
        spread: ``uniform``; ``zipf``, the k-th adapter's share as k to the -1.1; ``half``, every
            second request without an adapter.
    """

    model: str
    tokens: int
    adapters: int
    ranks: str
    max_rank: int
    max_loras: int
    spread: str = "uniform"

    @property
    def label(self) -> str:
        what = "mix" if self.ranks == "mix" else f"r{self.ranks}"
        rest = "" if self.spread == "uniform" else f" {self.spread}"
        return (
            f"{self.model} T{self.tokens} A{self.adapters} {what} of {self.max_rank}, "
            f"{self.max_loras} slots{rest}"
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What a case has to reach on an H100.

    Attributes:
        most_us: of a layer's four modules; None where ``floor_share`` says it.
        ratios: over each peer, at least.
    """

    case: Case
    ratios: dict[str, float]
    most_us: float | None = None
    floor_share: float | None = None


def _ratios(vllm: float, csgmv: float, triton_v2: float) -> dict[str, float]:
    return {"vllm": vllm, "csgmv": csgmv, "triton_v2": triton_v2}


TARGETS = (
    Target(Case("8B", 1, 1, "16", 16, 1), _ratios(4, 3, 1.3), most_us=13),
    Target(Case("8B", 64, 8, "16", 16, 8), _ratios(4, 2.5, 1.3), most_us=22),
    Target(Case("8B", 64, 8, "mix", 128, 64), _ratios(8, 4, 1.5), most_us=34),
    Target(Case("8B", 256, 64, "mix", 128, 64), _ratios(3, 2, 1.2), most_us=250),
    Target(Case("8B", 4096, 8, "16", 16, 8), _ratios(2, 2.5, 1.15), floor_share=0.8),
    Target(Case("8B", 16384, 8, "16", 16, 8), _ratios(2, 2.5, 1.15), floor_share=0.8),
)


def cases(*, quick: bool) -> list[Case]:
    """The rows of the targets first; then, unless ``quick``, the rest of the grid."""
    targets = [target.case for target in TARGETS]
    return targets if quick else [*targets, *(case for case in _grid() if case not in targets)]


def _grid() -> Iterator[Case]:
    decode = [(t, a) for t in (1, 4, 16, 64, 128, 256) for a in (1, 4, 8, 16, 32, 64) if a <= t]
    prefill = [(t, a) for t in (1024, 2048, 4096, 8192, 16384) for a in (1, 4, 8)]
    for model in MODELS:
        for tokens, adapters in (*decode, *prefill):
            for ranks in ("8", "16", "64", "128", "mix"):
                least = 128 if ranks == "mix" else int(ranks)
                for max_rank in sorted({least, 128}):
                    for max_loras in sorted({adapters, 64}):
                        case = Case(model, tokens, adapters, ranks, max_rank, max_loras)
                        yield case
                        if adapters > 1:
                            yield replace(case, spread="zipf")
                        if tokens > 1:
                            yield replace(case, spread="half")


def ranks_of(case: Case) -> list[int]:
    """The rank of each adapter."""
    given = MIX if case.ranks == "mix" else (int(case.ranks),)
    return [given[slot % len(given)] for slot in range(case.adapters)]


def slots_of(case: Case) -> NDArray[np.int64]:
    """The slot of each row: requests interleaved in decoding, in runs in a prefill."""
    number = np.arange(case.tokens, dtype=np.int64)
    if case.spread == "zipf":
        weights = np.arange(1, case.adapters + 1) ** -1.1
        slots = np.random.default_rng(case.tokens).choice(
            case.adapters, case.tokens, p=weights / weights.sum()
        )
    elif case.spread == "half":
        slots = np.where(number % 2 == 0, number // 2 % case.adapters, NO_SLOT)
    else:
        slots = number % case.adapters
    return np.sort(slots) if case.tokens >= PREFILL_TOKENS else slots


def moved_bytes(shape: Shape, case: Case) -> int:
    """The bytes that one module has to move for a case, each of them once."""
    slots = slots_of(case)
    ranks = ranks_of(case)
    rank = sum(int(ranks[slot]) for slot in np.unique(slots) if slot != NO_SLOT)
    weights = rank * (len(shape.outputs) * shape.inputs + shape.width)
    rows = int((slots != NO_SLOT).sum()) * (shape.inputs + 2 * shape.width)
    return ITEM_BYTES * (weights + rows)


def floor_us(case: Case, bandwidth: float, modules: tuple[str, ...] | None = None) -> float:
    """The floor of some modules, or all four.

    Args:
        bandwidth: bytes a second.
    """
    shapes = MODELS[case.model]
    return 1e6 * sum(moved_bytes(shapes[name], case) for name in modules or tuple(shapes)) / bandwidth


def predicted_us(case: Case, bandwidth: float, launches_us: float = TWO_LAUNCHES_US) -> float:
    """What a layer is thought to take: each module's launches, then its bytes at a share of the bandwidth."""
    return len(MODELS[case.model]) * launches_us + floor_us(case, bandwidth) / SHARE_OF_BANDWIDTH


def prediction_table() -> str:
    """Every target's row on each GPU, as predicted; in Markdown."""
    given = ", ".join(f"{gpu} {bandwidth / 1e12} TB/s" for gpu, bandwidth in GIVEN_BANDWIDTH.items())
    lines = [
        "Predicted, not measured. A layer's four modules in µs: the floor; with two launches a module",
        f"({TWO_LAUNCHES_US} µs), the second launched early ({TWO_LAUNCHES_EARLY_US} µs), or one"
        f" ({FUSED_LAUNCH_US} µs) [estimates], and",
        f"bytes at {SHARE_OF_BANDWIDTH:.0%} of the copy bandwidth ({given}) [estimates].",
        "",
        "| case | GPU | floor | predicted | predicted, early | predicted, fused | to reach on an H100 |",
        "|---|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        wanted = target.most_us
        if wanted is None and target.floor_share is not None:
            wanted = floor_us(target.case, GIVEN_BANDWIDTH["H100"]) / target.floor_share
        for gpu, bandwidth in GIVEN_BANDWIDTH.items():
            times = [floor_us(target.case, bandwidth)]
            launches = (TWO_LAUNCHES_US, TWO_LAUNCHES_EARLY_US, FUSED_LAUNCH_US)
            times += [predicted_us(target.case, bandwidth, cost) for cost in launches]
            told = " | ".join(f"{time:.1f}" if time < 100 else f"{time:.0f}" for time in times)
            goal = f"≤ {wanted:.0f}" if gpu == "H100" and wanted is not None else ""
            lines.append(f"| {target.case.label} | {gpu} | {told} | {goal} |")
    return "\n".join(lines)
