"""What every step does with adapters: each that it needs gets a slot, and what is not available runs blank.

A blank adapter runs without its weights. Nothing here raises within a step: that would end the engine for
everybody. The worker reports the blank run, keeps what it has in host memory, and a later step tries again.
Source: vllm/lora/worker_manager.py, 0.32.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from time import monotonic
from typing import Any, NamedTuple, Protocol, TypeVar

from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.notices import MOST_REASON, Notices
from lora_fs.worker_patch.worker.slots.tiers import NoRoom, Tiers

logger = logging.getLogger(__name__)

KEPT = 256
RETRY_S = 1.0  # before a step tries again to make a blank adapter available
RETRY_TIMES = 10  # or so many times what the failed try took: tries take a tenth of the steps' time at most
RETRY_STEPS, RETRY_MOST_STEPS = 50, 1000  # of several ranks, which have the same steps and no common clock
Said = TypeVar("Said")


class Asks(Protocol):
    """Says whether a step's request wants its adapter read again."""

    def asks(self, request: Any) -> bool: ...


class Blank(NamedTuple):
    """When an adapter's tries began to fail, and when a step may try again, by ``Steps._now``."""

    since: float
    until: float


class Steps:
    """The steps' side of a worker's adapter manager.

    Attributes:
        in_place: which requests with ``load_inplace`` are still to be read for.
        failures: adapter → why its last load failed, the latest ``KEPT``.
        blank: the adapters that run without their weights.
        counters: seconds and bytes of loads, blank runs.
    """

    _adapter_manager: Any
    _alone: bool  # the only rank of its engine
    _begun = 0  # steps
    notices: Notices
    in_place: Asks
    failures: dict[int, str]
    blank: dict[int, Blank]
    counters: defaultdict[str, float]

    @property
    def tiers(self) -> Tiers:
        tiers: Tiers = self._adapter_manager.tiers
        return tiers

    def _load_now(self, request: LoRARequest, *, needed: bool = False) -> None:
        """Read an adapter. ``needed``: by the running step."""
        raise NotImplementedError

    def set_active_adapters(self, requests: set[Any], mapping: Any | None) -> None:
        """Begin a step."""
        self._begun += 1
        ids = {request.lora_int_id for request in requests if request}
        if mapping is not None:
            # vLLM compares requests by name: two adapters of one name would be one in ``requests``.
            ids.update(mapping.index_mapping, mapping.prompt_mapping)
            ids.discard(0)
        if self._begins(ids, requests):
            self._activate({int(adapter) for adapter in ids}, requests)
        if mapping is not None:
            self._adapter_manager.set_adapter_mapping(mapping)
            self._adapter_manager.begin_step()

    def _begins(self, ids: set[int], requests: set[Any]) -> bool:
        """Whether a step has anything to do before it runs: most go on with what the last one had."""
        active = self._adapter_manager._active_adapters
        if not self.tiers.goes_on(ids) or any(adapter not in active for adapter in ids):
            return True
        return any(self.in_place.asks(one) for one in requests if one)

    def _waits(self, adapter: int) -> bool:
        """Whether an adapter runs blank, and no step may try again yet."""
        return adapter in self.blank and self._now() < self.blank[adapter].until

    def _now(self) -> float:
        """Seconds; of several ranks the steps that began, so that all try again in the same one."""
        return monotonic() if self._alone else self._begun

    def _activate(self, ids: set[int], requests: set[Any]) -> None:
        needed = {request.lora_int_id: request for request in requests if request}
        begun, active = self.tiers.begin_step(ids), self._adapter_manager._active_adapters
        for adapter in sorted(ids):  # a set's order is each rank's own, and all ranks must evict the same
            if self._waits(adapter):
                if adapter in begun:
                    self._count_blank(adapter)
                continue
            began = monotonic()
            try:
                if adapter not in self.tiers.entries or self.in_place.asks(needed.get(adapter)):
                    self._load_now(needed[adapter], needed=True)
                self._adapter_manager.activate_adapter(adapter)
                self.blank.pop(adapter, None)
            except Exception as error:
                self._run_blank(adapter, error, monotonic() - began)
        for adapter in ids:
            if adapter not in active and adapter not in self.blank:
                self._run_blank(adapter, NoRoom("another adapter of the same step has its slot"), 0.0)

    def _run_blank(self, adapter: int, error: Exception, took_s: float) -> None:
        """Let the step go on without the adapter's weights: only the requests that name it are wrong."""
        reason = repr(error)[:MOST_REASON]
        logger.error("adapter %d is not available, and runs without its weights: %s", adapter, reason)
        self._fail(adapter, reason)
        now = self._now()
        since = self.blank[adapter].since if adapter in self.blank else now
        seconds = max(RETRY_S, RETRY_TIMES * took_s)
        steps = max(RETRY_STEPS, min(now - since, RETRY_MOST_STEPS))
        self.blank = latest({**self.blank, adapter: Blank(since, now + (seconds if self._alone else steps))})
        self._count_blank(adapter)
        if adapter in self._adapter_manager._active_adapters:  # with the weights that it had before
            self._adapter_manager.deactivate_adapter(adapter)

    def _count_blank(self, adapter: int) -> None:
        self.counters["blank_runs"] += 1
        self.notices.blank(adapter, self.failures.get(adapter, ""))

    def _fail(self, adapter: int, reason: str) -> None:
        self.failures = latest({**self.failures, adapter: reason})


def latest(known: dict[int, Said]) -> dict[int, Said]:
    """The last ``KEPT`` of them."""
    return dict(list(known.items())[-KEPT:])
