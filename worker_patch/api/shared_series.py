"""One scrape has the series of all API servers, whichever of them it reaches.

vLLM has several API servers on one port. Each leaves its series in vLLM's folder for them, and whoever
answers a scrape adds the others' counts to its own. A count never falls, as it would if scrapes met now one
server's, now another's: an answer writes before it reads, so that no later answer knows less. Only what a
server no longer tells, as a revision beyond its bound, makes a count fall. Gauges are those of the server
that answers: all of them follow the same registry and the same workers. ``OWN`` has those that differ by
server: its requests, its loads, and its troubles.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
from prometheus_client import Metric, generate_latest
from prometheus_client.samples import Sample

from lora_fs.sidecar.server.routes.observe import Collected

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

FOLDER: Final = "PROMETHEUS_MULTIPROC_DIR"  # vLLM makes it, and removes it at its end
WRITE_S: Final = 5.0  # what other servers know of this one is at most so old
COUNTS: Final = frozenset(("counter", "histogram", "summary"))
Combine = Callable[[float, float], float]
OWN: Final[Mapping[str, Combine]] = {
    "lora_fs_ready": min,
    "lora_fs_conditions": max,
    "lora_fs_downloads": add,
    "lora_fs_adapter_loaded": max,
    "lora_syncer_adapter_status": max,
    "lora_fs_adapter_failed": max,
    "lora_fs_adapter_in_flight": add,
}

Series = tuple[list[Metric], list[Metric]]
"""A server's own series, and those of the engine's workers as it last saw them."""


def server_number(client: EngineClient) -> int:
    """Which of the API servers this is; 0 if there is one."""
    return getattr(getattr(client, "engine_core", None), "client_index", 0)


def shared_among(client: EngineClient, own: Callable[[], Series]) -> SharedSeries | None:
    """What this server shares with others; None if there are none."""
    count, folder = client.vllm_config.parallel_config._api_process_count, os.environ.get(FOLDER)
    if count < 2 or folder is None:
        return None
    return SharedSeries(Path(folder), server_number(client), count, own)


class SharedSeries:
    """The series of ``count`` servers, of which this one is ``number``. ``own`` collects its own."""

    def __init__(self, folder: Path, number: int, count: int, own: Callable[[], Series]) -> None:
        self._files = [folder / f"lora_fs_{one}.json" for one in range(count)]
        self._file, self._own = self._files[number], own
        self._writing = anyio.Lock()  # else what was collected earlier could replace what came later

    async def exposed(self) -> bytes:
        """The text of a scrape."""
        return await anyio.to_thread.run_sync(self._with_others, await self._written())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let the other servers know of this one, also while no scrape reaches it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._write_often)
            yield
            tasks.cancel_scope.cancel()

    async def _write_often(self) -> None:
        while True:
            await self._written()
            await anyio.sleep(WRITE_S)

    async def _written(self) -> Series:
        async with self._writing:
            own = self._own()
            with suppress(OSError):  # the folder is full: a scrape of this server tells all the same
                await anyio.to_thread.run_sync(self._write, own)
            return own

    def _write(self, own: Series) -> None:
        temporary = self._file.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps([[_packed(one) for one in families] for families in own]))
        temporary.replace(self._file)

    def _with_others(self, own: Series) -> bytes:
        others = (file for file in self._files if file != self._file and file.exists())
        read = [
            [[_unpacked(*one) for one in families] for families in json.loads(file.read_text())]
            for file in others
        ]
        served, worked = zip(own, *read, strict=True)
        # All servers see the same workers; the largest count is what one of them saw last.
        return generate_latest(Collected([*combined(served, add), *combined(worked, max)]))


def combined(series: Iterable[list[Metric]], of_counts: Combine) -> list[Metric]:
    """Return the first server's families; counts and what is in ``OWN`` are combined with the others'."""
    first, *others = ({one.name: one for one in families} for families in series)
    for families in others:
        for name, other in families.items():
            of = of_counts if other.type in COUNTS else OWN.get(name)
            if of is None:
                continue
            mine = first.setdefault(name, Metric(name, other.documentation, other.type))
            known = {_series(sample): sample for sample in mine.samples}
            for sample in other.samples:
                before = known.get(_series(sample))
                value = sample.value if before is None else of(before.value, sample.value)
                known[_series(sample)] = sample._replace(value=value)
            mine.samples = [*known.values()]
    return [*first.values()]


def _packed(family: Metric) -> tuple[object, ...]:
    samples = [(sample.name, sample.labels, sample.value) for sample in family.samples]
    return family.name, family.documentation, family.type, samples


def _unpacked(name: str, documentation: str, kind: str, samples: Iterable[Iterable[Any]]) -> Metric:
    family = Metric(name, documentation, kind)
    family.samples = [Sample(*sample) for sample in samples]
    return family


def _series(sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())
