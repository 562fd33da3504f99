"""These run compiled where a GPU is, and else in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/ops/gpu`, which tests/ops/test_interpreted.py does in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings

from lora_fs.kernels.gpu import launch, scatter
from lora_fs.kernels.weights.layout import Layer, Packed

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")

collect_ignore_glob = [] if INTERPRETED or DEVICE.type == "cuda" else ["test_*.py"]


# An example may be the first to need a kernel, which takes seconds to compile; the kit has no other profile.
settings.register_profile("compiling", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("compiling")

# Floats after the scratch memory that nothing may write to.
GUARD = 1024


@pytest.fixture(scope="session", autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Scratch memory holds NaN before it is written, and nothing is written beside it."""
    guards: list[torch.Tensor] = []

    def poisoned(elements: int, device: torch.device) -> torch.Tensor:
        memory = torch.full((GUARD + elements + GUARD,), torch.nan, device=device)
        # A captured graph's memory is its own, and nothing can be looked at meanwhile.
        if device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            assert all(guard.isnan().all() for guard in guards)
            guards[:] = [memory[:GUARD], memory[-GUARD:]]
        return memory[GUARD:-GUARD]

    with patch.object(launch, "new_scratch", poisoned):
        yield
    assert all(guard.isnan().all() for guard in guards)


@pytest.fixture(scope="session", autouse=True)
def few_programs() -> Iterator[None]:
    """In the interpreter a stack is filled by two programs: most of a GPU's find nothing to do."""
    with patch.object(scatter, "PROGRAMS", 2 if INTERPRETED else scatter.PROGRAMS):
        yield


def in_turns(names: Sequence[str], dtypes: Sequence[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    """Every name with every type; in the interpreter, which takes seconds for a pair, each name with one."""
    if INTERPRETED:
        return [(name, dtypes[n % len(dtypes)]) for n, name in enumerate(names)]
    return [*product(names, dtypes)]


def on_device(layer: Layer) -> Layer:
    """A layer's copy where the kernels run."""
    moved = Layer.empty(layer.shape, len(layer.packed))
    for slot, packed in enumerate(layer.packed):
        moved.put(slot, None if packed is None else _moved(packed))
    return moved


def _moved(packed: Packed) -> Packed:
    b = tuple(None if matrix is None else matrix.to(DEVICE) for matrix in packed.b)
    return Packed(packed.a.to(DEVICE), b, packed.ranks, packed.scale)


def capture(call: Callable[[], None]) -> Callable[[], None]:
    """What replays the launches that a call makes: the same kernels, grids and arguments again."""
    if DEVICE.type == "cuda":
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        replay: Callable[[], None] = graph.replay
        return replay
    recorders: dict[str, Any] = {
        name: _Recorder(vars(launch)[name]) for name in ("shrink_kernel", "expand_kernel")
    }
    launches: list[Callable[[], None]] = []
    for recorder in recorders.values():
        recorder.launches = launches
    with patch.multiple(launch, **recorders):
        call()

    def again() -> None:
        for launched in launches:
            launched()

    return again


class _Recorder:
    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Callable[[], None]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **kwargs: Any) -> None:
            self.launches.append(lambda: self.kernel[grid](*args, **kwargs))

        return record
