"""What a stock vLLM is busy with, by its ``/metrics``: what to ask for, how often, how to read it.

vLLM takes 5 ms of its interpreter to write all its metrics, so a look asks for three by name. One of them has
a series for each set of adapters that vLLM ever saw in use together: thousands after minutes, and more for as
long as it lives. Looks at that one wait, so that vLLM writes at most ``BYTES_S`` for them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import anyio.to_thread
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lora_fs.sidecar.engine.protocol import Activity, Queue
from lora_fs.sidecar.errors import EngineUnavailable

ADAPTERS = "vllm:lora_requests_info"
_RUNNING, _WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
_COUNTS = (_RUNNING, _WAITING)
BYTES_S = 256 * 1024  # of metrics: vLLM takes 40 to 80 ns for each
PART_BYTES = 64 * 1024  # it writes a part on the event loop of its streams, and all in a thread


class Looks:
    """Looks at one engine.

    Args:
        ask: for the text of these metrics, of all without names; empty if there is none, or no such part.
            Raises EngineUnavailable.
    """

    def __init__(
        self, ask: Callable[..., Awaitable[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask, self._clock, self._lock = ask, clock, asyncio.Lock()
        self._forget()

    def _forget(self) -> None:
        self._last, self._bytes = Activity(), 0
        self._next_at = 0.0  # for the adapters in use
        self._has_parts = True  # else it gives all its metrics or none, as vLLM's Rust front end does

    async def activity(self) -> Activity:
        """Look; which adapters are in use is as of the last look at them, unless there is no request.

        Raises EngineUnavailable: it is unknown.
        """
        async with self._lock:  # who comes meanwhile would ask for all of it again
            try:
                return await self._look()
            except EngineUnavailable:
                self._forget()  # another engine may answer next
                raise

    async def _look(self) -> Activity:
        is_due = self._clock() >= self._next_at
        parts: tuple[str, ...] = ()
        if self._has_parts and not is_due:
            parts = _COUNTS
        elif self._has_parts and self._bytes <= PART_BYTES:
            parts = (ADAPTERS, *_COUNTS)
        elif not is_due:
            return replace(self._last, is_new=False)
        text = await self._ask(*parts)
        if parts and _RUNNING not in text:
            text = await self._ask()
            self._has_parts, is_due = _RUNNING not in text, True
        elif not is_due and ADAPTERS in text:
            self._has_parts, is_due = False, True
        seen = await anyio.to_thread.run_sync(read_activity, text)
        if is_due:
            self._bytes = len(text)
            self._next_at = self._clock() + self._bytes / BYTES_S
        else:
            busy = frozenset[str]() if seen.queue == Queue(0, 0) else self._last.busy
            seen = replace(self._last, busy=busy, queue=seen.queue, is_new=False)
        self._last = seen
        return seen


def read_activity(metrics: str) -> Activity:
    """Read vLLM's gauge of LoRA requests: of its series the one with the latest time holds.

    vLLM keeps a series for each set of adapters that it ever saw in use together, thousands after some
    minutes. So a series is parsed only if it is the latest.

    Raises EngineUnavailable: the gauge is there and cannot be read.
    Source: vllm/v1/metrics/loggers.py, 0.32: its value is a timestamp, its labels are lists.
    """
    lines = [line for line in metrics.splitlines() if line.startswith((ADAPTERS, *_COUNTS))]
    queue = _queue(lines)
    series = [line for line in lines if line.startswith(ADAPTERS)]
    if not series:
        return Activity(queue=queue)
    try:
        (latest,) = _samples([max(series, key=seen_at)])
    except ValueError as error:
        raise EngineUnavailable(f"the engine's metric {ADAPTERS} cannot be read: {error}") from error
    labels = latest.labels
    lists = (labels.get("running_lora_adapters", ""), labels.get("waiting_lora_adapters", ""))
    slots = labels.get("max_lora", "")
    return Activity(
        busy=frozenset(name for names in lists for name in names.split(",") if name),
        max_loras=int(slots) if slots.isdecimal() and int(slots) > 0 else None,
        queue=queue,
    )


def _queue(lines: Sequence[str]) -> Queue | None:
    """Read vLLM's two gauges of requests, of all its data-parallel engines together; None without them."""
    try:
        samples = _samples([line for line in lines if line.startswith(_COUNTS)])
        running, waiting = (
            [int(sample.value) for sample in samples if sample.name == name] for name in _COUNTS
        )
    except (ValueError, OverflowError):
        return None
    return Queue(sum(running), sum(waiting)) if running and waiting else None


def _samples(lines: Sequence[str]) -> list[Sample]:
    return [one for family in text_string_to_metric_families("\n".join(lines)) for one in family.samples]


def seen_at(series: str) -> float:
    """When vLLM last wrote a series of its gauge of LoRA requests: its value. Raises ValueError."""
    return float(series[series.rfind("}") + 1 :])
