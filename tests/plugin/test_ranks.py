"""Ranks of one engine decide alike, however differently their loads end: over random histories."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.api.calls import admission, heard
from lora_fs.worker_patch.notices import Waiting
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.load.loader import Done
from lora_fs.worker_patch.worker.slots import steps
from lora_fs.worker_patch.worker.slots.tiers import Eviction
from tests.plugin.without_tensors import Worker, share

IDS = st.sampled_from([1, 2, 9, 10, 17, 18])  # a set has them in the order in which they came
USERS = st.sampled_from(["api-0", "api-1"])
BUDGET = 30


class HandOperated:
    """A loader whose loads end when the test says so, in any order."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[Callable[[], Any], Callable[[Any], None]]] = {}
        self.done: list[Done[Any]] = []

    def start(self, adapter: int, prepare: Callable[[], Any], ended: Callable[[Any], None]) -> None:
        self.jobs.setdefault(adapter, (prepare, ended))

    def end(self, adapter: int) -> None:
        prepare, ended = self.jobs.pop(adapter)
        try:
            self.done.append(Done(adapter, prepare()))
        except ValueError as error:
            self.done.append(Done(adapter, None, reason=str(error)))
        ended(self.done[-1].adapter)

    def collect(self) -> list[Done[Any]]:
        done, self.done = self.done, []
        return done

    def forget(self, adapter: int) -> None:
        self.jobs.pop(adapter, None)
        self.done = [one for one in self.done if one.id != adapter]

    def later(self, work: object) -> None:
        """It touches no tier."""


class Ranks(RuleBasedStateMachine):
    """Two API servers of an engine of several ranks, which ask as ``InProcess`` does."""

    @initialize(ranks=st.integers(2, 4), slots=st.integers(1, 3), eviction=st.sampled_from(["lru", "fifo"]))
    def begin(self, ranks: int, slots: int, eviction: Eviction) -> None:
        self.ranks: list[Worker] = []
        self.heard: defaultdict[int, Waiting] = defaultdict(Waiting)
        for _ in range(ranks):
            worker: Any = Worker(BUDGET, slots=slots, alone=False, eviction=eviction)
            worker._loader = HandOperated()
            worker.notices.ended = partial(self.hear, worker.notices.name)
            self.ranks.append(worker)
        self.sequence = 0
        self.admit: dict[tuple[str, int], Any] = {}
        self.loading: set[tuple[str, int]] = set()

    def hear(
        self, name: str, adapter: int, load: str, size_bytes: int | None, but: str | None = None
    ) -> None:
        self.heard[adapter].add((load, name), size_bytes)

    def call(self, call: str, user: str, **ask: Any) -> list[dict[str, Any]]:
        self.sequence += 1
        ask |= {"user": user, "sequence": self.sequence}
        return [rpc.CALLS[call](worker, ask) for worker in self.ranks]

    @rule(adapter=IDS, user=USERS, size=st.integers(0, BUDGET // 2), more=st.booleans(), spare=st.booleans())
    def load(self, adapter: int, user: str, size: int, more: bool, spare: bool) -> None:
        """Ask, and ask again once each rank's notice has come; ``more``: one rank's share is larger."""
        key = user, adapter
        ask: dict[str, Any] = {"id": adapter, "name": f"a{adapter}", "path": "/", "wait_s": 0}
        ask |= {"priority": adapter % 2, "pinned": adapter == 1, "spare": spare}
        for index, worker in enumerate(self.ranks):
            worker.sizes.setdefault(adapter, size + (index == 1 and more))
        again = key not in self.loading
        self.loading.add(key)
        answers = self.call("load", user, **ask, again=again, admit=self.admit.pop(key, None))
        states = {answer["state"] for answer in answers}
        if states == {"ready"} or "full" in states or "failed" in states:
            self.loading.discard(key)
            if states != {"ready"}:
                self.call("drop", user, id=adapter)
            return
        self.admit[key] = admission(heard(answer, self.heard[adapter]) for answer in answers)

    @rule(adapter=IDS, user=USERS)
    def have(self, adapter: int, user: str) -> None:
        """Load it from begin to end."""
        for _ in range(2):
            self.load(adapter, user, BUDGET // 6, more=False, spare=False)
            for rank in range(len(self.ranks)):
                self.end_all(rank)

    @rule(rank=st.integers(0, 3), adapter=IDS, fails=st.integers(0, 9))
    def end(self, rank: int, adapter: int, fails: int) -> None:
        """One rank's load ends, well or not."""
        worker: Any = self.ranks[rank % len(self.ranks)]
        if adapter in worker._loader.jobs:
            worker.broken = {adapter: "no memory"} if fails == 0 else {}
            worker._loader.end(adapter)

    @rule(rank=st.integers(0, 3))
    def end_all(self, rank: int) -> None:
        """One rank is ahead of the others."""
        worker: Any = self.ranks[rank % len(self.ranks)]
        for adapter in list(worker._loader.jobs):
            worker._loader.end(adapter)

    @rule(adapter=IDS, user=USERS)
    def hold(self, adapter: int, user: str) -> None:
        answers = self.call("hold", user, id=adapter)
        assert len({answer["held"] for answer in answers}) == 1

    @rule(adapter=IDS, user=USERS)
    def drop(self, adapter: int, user: str) -> None:
        self.loading.discard((user, adapter))
        self.call("drop", user, id=adapter)

    @rule(user=USERS, holds=st.sets(IDS, max_size=2), pinned=IDS)
    def sync(self, user: str, holds: set[int], pinned: int) -> None:
        meant = holds | {adapter for one, adapter in self.loading if one == user}
        policies = {str(pinned): [pinned % 3, pinned % 2 == 0]}
        answers = self.call("sync", user, holds=[*meant], policies=policies)
        assert len({tuple(answer["resident"]) for answer in answers}) == 1

    @rule(adapters=st.sets(IDS, min_size=1, max_size=3))
    def step(self, adapters: set[int]) -> None:
        """Of what the engine has, as the gate lets pass.

        vLLM gives a set of requests, which each process has in an order of its own: it hashes their names.
        """
        there = [one for one in sorted(adapters) if one in self.ranks[0].tiers.entries]
        requests: Any = [LoRARequest(f"a{one}", one, "/") for one in there[: len(self.ranks[0].tiers.slots)]]
        for worker in self.ranks:
            requests.reverse()
            worker.set_active_adapters(requests, None)
            assert worker.counters["blank_runs"] == 0

    @invariant()
    def agree(self) -> None:
        """On all that decides who goes next: entries with their ticks and holders, slots, and room."""
        first, *others = (worker.tiers for worker in self.ranks)
        for tiers in others:
            assert tiers.entries == first.entries
            assert (tiers.slots, tiers.step) == (first.slots, first.step)
            assert tiers.free_bytes == first.free_bytes
            assert tiers.counters == first.counters

    @invariant()
    def room(self) -> None:
        """What is reserved belongs to a load that is known: nothing stays reserved for nobody."""
        for worker in self.ranks:
            assert worker.tiers._reserved.keys() == {*worker.under_way}


TestRanks = Ranks.TestCase
TestRanks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def two_ranks() -> list[Worker]:
    """Ranks with three adapters that a registry's users asked for, and room for no other."""
    ranks = [Worker(BUDGET, alone=False) for _ in range(2)]
    for worker in ranks:
        for adapter in (1, 9, 17):
            worker._adapter_manager.admit(share(adapter, BUDGET // 3), BUDGET // 3)
            worker.tiers.entries[adapter].users.add("api")
    return ranks


def evicted(ranks: list[Worker]) -> list[list[int]]:
    """Those that leave each rank for another adapter, once no step needs any."""
    for worker in ranks:
        worker.set_active_adapters(set(), None)
    return [worker.tiers.admit(33, BUDGET // 3) for worker in ranks]


def test_the_order_of_a_set_decides_nothing() -> None:
    """A process hashes names in its own way, and a set of these ids has them in the order they came."""
    ranks, requests = two_ranks(), [LoRARequest(f"a{one}", one, "/") for one in (1, 9)]
    ask = {"id": 17, "user": "api", "sequence": 1}
    for worker in ranks:
        in_this_order: Any = requests
        worker.set_active_adapters(in_this_order, None)
        requests.reverse()
        assert rpc.hold(worker, ask) == {"held": True}
    assert evicted(ranks) == [[1], [1]]


def test_a_rank_that_tries_a_blank_adapter_again_uses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed alone, and tries alone; what else the step has was used when the step began."""
    ranks, requests = two_ranks(), {LoRARequest("a1", 1, "/")}
    with monkeypatch.context() as patch:
        patch.setattr(ranks[1]._adapter_manager, "activate_adapter", lambda adapter: 1 / 0)
        for worker in ranks:
            worker.set_active_adapters(requests, None)
    for worker in ranks:
        for adapter in (9, 17):
            rpc.hold(worker, {"id": adapter, "user": "api", "sequence": 1})
            rpc.sync(worker, {"user": "api", "sequence": 2, "holds": [], "policies": {}})
        for _ in range(steps.RETRY_STEPS):
            worker.set_active_adapters(requests, None)
        assert 1 in worker._adapter_manager._active_adapters
    assert evicted(ranks) == [[1], [1]]


def test_ranks_try_a_blank_adapter_again_in_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the failed try took on each: some with its weights, some without, is no adapter."""
    ranks, requests, now = [Worker(alone=False) for _ in range(2)], {LoRARequest("lost", 7, "/gone")}, [100.0]
    monkeypatch.setattr(steps, "monotonic", lambda: now[0])

    def step() -> set[bool]:
        now[0] += 0.1
        for worker in ranks:
            worker.set_active_adapters(requests, None)
        return {7 in worker._adapter_manager._active_adapters for worker in ranks}

    def fails_late(*_: object, **__: object) -> None:
        now[0] += 1.8
        raise OSError("the volume does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(ranks[1], "_prepare", fails_late)
        ranks[0].broken[7] = "no folder"
        assert step() == {False}
    ranks[0].broken.clear()
    assert [step() for _ in range(300)] == 49 * [{False}] + 251 * [{True}]


def test_tries_of_a_lasting_failure_get_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds up every request of the engine."""
    worker, tries, run_blank = Worker(alone=False), list[int](), Worker._run_blank

    def counted(self: Worker, *args: Any) -> None:
        tries.append(self._begun)
        run_blank(self, *args)

    monkeypatch.setattr(Worker, "_run_blank", counted)
    worker.broken[7] = "no folder"
    for _ in range(4000):
        worker.set_active_adapters({LoRARequest("lost", 7, "/gone")}, None)
    assert tries == [1, 51, 101, 201, 401, 801, 1601, 2601, 3601]
