"""Loads beside the step: disk, dtype and packing in a thread, one load an adapter.

The engine's thread starts jobs and collects what is ready; no step waits for one. While there are
jobs the interpreter hands its lock over ten times as often: a step that comes back from a matrix
product would otherwise wait up to 5 ms for a thread that reads. Nor do they share its processor where
if there is another: the engine's threads would be bound to the engine's own. If the steps take all
processors, a load yields to them.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Generic, TypeVar

from lora_fs.worker_patch import processors
from lora_fs.worker_patch.notices import MOST_REASON

logger = logging.getLogger(__name__)

Prepared = TypeVar("Prepared")

THREADS = 2  # and one for what is done later
SWITCH_S = 0.0005
NICENESS = 10  # a tenth of a step's thread's share of a processor that both want, all of one that none does


@dataclass(frozen=True, slots=True)
class Done(Generic[Prepared]):
    """A load that ended. ``took_s``: from its start to its end; ``reason``: why there is no ``adapter``."""

    id: int
    adapter: Prepared | None
    took_s: float = 0.0
    reason: str = ""


class Loader(Generic[Prepared]):
    """Used by one thread, the engine's; ``prepare`` runs in others."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS + 1, "lora-fs-load", initializer=_step_aside)
        self._jobs: dict[int, Future[tuple[Prepared, float]]] = {}
        self._usual_switch_s = sys.getswitchinterval()

    def start(
        self,
        adapter: int,
        prepare: Callable[[], Prepared],
        ended: Callable[[Prepared | None], None] = lambda brought: None,
    ) -> None:
        """Begin a load, unless there is one of this adapter.

        Args:
            ended: called by the load's thread with what the load brought, None if it failed.
        """
        started = monotonic()

        def timed() -> tuple[Prepared, float]:
            return prepare(), monotonic() - started

        if adapter not in self._jobs:
            job = self._threads.submit(timed)
            sys.setswitchinterval(min(self._usual_switch_s, SWITCH_S))
            self._jobs[adapter] = job
            job.add_done_callback(lambda future: ended(_brought(future)))

    def forget(self, adapter: int) -> None:
        """Drop a load, if there is one: it does not begin, or its result is discarded."""
        job = self._jobs.pop(adapter, None)
        if job is not None:
            job.cancel()
            self._rest()

    def later(self, work: Callable[[], object]) -> None:
        """Run ``work`` in a thread that nobody waits for; logs an error, also that no thread is left."""
        try:
            self._threads.submit(work).add_done_callback(_tell)
        except RuntimeError as error:
            logger.warning("beside the loads: %r", error)

    def wait(self, adapter: int, most_s: float) -> bool:
        """Let its load have the processor, and the interpreter's lock, until it ends or for ``most_s``.

        Returns:
            Whether it ended, or there is none.
        """
        return adapter not in self._jobs or not futures.wait([self._jobs[adapter]], most_s).not_done

    def collect(self) -> list[Done[Prepared]]:
        """The loads that ended since the last call."""
        ended = []
        for adapter, job in list(self._jobs.items()):
            if not job.done():
                continue
            del self._jobs[adapter]
            error = job.exception()
            if error is None:
                ended.append(Done(adapter, *job.result()))
            else:
                logger.warning("adapter %d is not loaded: %s", adapter, repr(error)[:MOST_REASON])
                reason = str(error) or type(error).__name__
                # Half a character, as in a pickle's names, would end the thread that sends vLLM's messages.
                text = reason[:MOST_REASON].encode(errors="backslashreplace").decode()
                ended.append(Done(adapter, None, reason=text[:MOST_REASON]))
        if ended:
            self._rest()
        return ended

    def _rest(self) -> None:
        if not self._jobs:
            sys.setswitchinterval(self._usual_switch_s)


def _brought(job: Future[tuple[Prepared, float]]) -> Prepared | None:
    return None if job.cancelled() or job.exception() is not None else job.result()[0]


def _tell(done: Future[object]) -> None:
    if (error := done.exception()) is not None:
        logger.warning("beside the loads: %r", error)


def _step_aside() -> None:
    """Let this thread run where vLLM itself may and no step does, alone, and after those that compute.

    Otherwise it would start as many OpenMP threads as the engine has, on the engine's processors.
    """
    with suppress(OSError, AttributeError):  # no OpenMP in this process
        openmp = ctypes.CDLL(None)
        openmp.omp_set_num_threads(1)
        openmp.omp_get_num_procs()  # Intel's binds a thread that is new to it; from now on it is not
    if sys.platform == "linux":  # elsewhere the whole process would be
        with suppress(OSError):
            os.nice(NICENESS)
    parent = multiprocessing.parent_process()
    if parent is not None and any(name in os.environ for name in processors.BINDING):
        processors.keep_off(processors.of_steps(), like=parent.pid or 0)
