"""A worker per adapter: it does what the last pass decided for its adapter, and waits for no other adapter.

The decisions of a pass replace those of the pass before. They are the queue: work that is no longer decided
never begins. An adapter has one worker at a time, which exists while it acts. Concurrent unloads and loads
have a bound each, and begin in the plan's order. A call that hangs takes one of these
places until the engine's timeout. A failed adapter waits out its growing delay (``backoff``) first.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Coroutine, Mapping
from itertools import islice
from typing import Any

from lora_fs.sidecar.errors import LoraFsError
from lora_fs.sidecar.logs import event

logger = logging.getLogger(__name__)

Work = Callable[[], Coroutine[Any, Any, object]]


class Kind(enum.Enum):
    """What a worker does. An adapter's unloads come before its load."""

    UNLOAD = "unload"
    LOAD = "load"


class Workers:
    """The workers of one replica, on the event loop.

    Args:
        most: how many of each kind run at once.
    """

    def __init__(self, most: Mapping[Kind, int]) -> None:
        self._most = most
        self._decided: dict[Kind, dict[str, Work]] = {}
        self._running: dict[str, tuple[Kind, asyncio.Task[object]]] = {}  # by adapter

    def follow(self, decided: Mapping[Kind, Mapping[str, Work]]) -> None:
        """Do this, by the engine's names in their order. Drops earlier decisions that have not begun."""
        self._decided = {kind: dict(decided.get(kind, {})) for kind in Kind}
        self._begin()

    def stop(self) -> None:
        """Begin nothing more, and cancel running calls. Whether the engine ended those is unknown."""
        self._decided.clear()
        for _, task in self._running.values():
            task.cancel()

    def _begin(self) -> None:
        for kind, waiting in self._decided.items():
            free = self._most[kind] - sum(running is kind for running, _ in self._running.values())
            for name in list(islice(filter(self._is_free, waiting), max(0, free))):
                if self._is_free(name):  # not taken by another of the adapter's names just now
                    self._run(kind, name, waiting.pop(name))

    def _is_free(self, name: str) -> bool:
        return _adapter(name) not in self._running

    def _run(self, kind: Kind, name: str, work: Work) -> None:
        task = asyncio.create_task(work(), name=f"{kind.value} {name}")
        self._running[_adapter(name)] = kind, task
        task.add_done_callback(lambda done: self._ended(name, done))

    def _ended(self, name: str, task: asyncio.Task[object]) -> None:
        del self._running[_adapter(name)]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, LoraFsError):  # whoever raised that has logged it
            told = event("worker.failed", adapter=name)
            logger.error("a worker failed; the next pass decides again", exc_info=error, extra=told)
        self._begin()


def _adapter(engine_name: str) -> str:
    return engine_name.partition("@")[0]
