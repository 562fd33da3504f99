"""The scripts of benchmarks/kernels, which are no package, as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = (
    "figures",
    "grid",
    "gate",
    "plot",
    "peers",
    "gpu_timing",
    "gpu_summary",
    "gpu_transfers",
    "bench_gpu_ops",
    "tune_gpu_ops",
)


@contextmanager
def loaded() -> Iterator[SimpleNamespace]:
    """Import them by their bare names, as they do each other; afterwards nothing is left of that."""
    path = list(sys.path)
    sys.path[:0] = [str(FOLDER / "kernels"), str(FOLDER)]
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in SCRIPTS})
    finally:
        sys.path[:] = path
        for name in SCRIPTS:
            sys.modules.pop(name, None)
