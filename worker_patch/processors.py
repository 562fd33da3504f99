"""Where an engine's steps run, and how a thread that works beside them keeps off.

On a CPU vLLM binds its workers' threads to all processors of a node but one. A step is as slow as the
slowest of them, so that what shares a processor with one delays every stream. The kernel does not know:
vLLM's core waits by spinning, and the processor that is left looks as busy as the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress

# What binds the threads of one OpenMP or another, and how vLLM writes a worker's processors there.
BINDING = {
    "GOMP_CPU_AFFINITY": re.compile(r"([\d ]+)"),
    "KMP_AFFINITY": re.compile(r"granularity=fine,explicit,proclist=\[([\d,]+)\]"),
    "OMP_PLACES": re.compile(r"\{([\d,]+)\}"),
    "OMP_PROC_BIND": re.compile(r"(?!)"),  # names none
}


def of_steps(environ: Mapping[str, str] = os.environ) -> frozenset[int]:
    """The processors that this worker's threads are bound to; none if vLLM has not bound them."""
    for name, written in BINDING.items():
        if found := written.fullmatch(environ.get(name, "")):
            return frozenset(map(int, re.findall(r"\d+", found[1])))
    return frozenset()


def keep_off(steps: Collection[int], like: int) -> None:
    """Let this thread run where the process ``like`` may, and no step does, if there is such a place."""
    with suppress(OSError, AttributeError):  # no such process or processor any more; not Linux
        usable = os.sched_getaffinity(like)
        os.sched_setaffinity(0, usable.difference(steps) or usable)
