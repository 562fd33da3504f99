"""Adapters come, go, hang and fail, and the engine dies: none waits for another, what is planned loads."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_fs.sidecar.errors import EngineUnavailable
from lora_fs.sidecar.model import Policy, PolicyKind, Record
from lora_fs.sidecar.reconcile.plan import ALWAYS
from lora_fs.sidecar.reconcile.reconciler import UNASKED_LOADS, UNLOADS, Limits
from lora_fs.sidecar.reconcile.residents.backoff import CEILING_S
from tests.reconcile.conftest import Clock, FakeEngine, FakeStager, FakeVolume, Rig

NAMES = st.sampled_from("abcdefghijkl")
SEVERAL = st.lists(NAMES, min_size=1, max_size=12, unique=True)
MOST_STUCK = 3  # below the bound of loads: with as many stuck as may run at once nothing else can
Result = TypeVar("Result")
POLICIES = st.sampled_from([Policy(kind=kind, ttl_s=60) for kind in (PolicyKind.EAGER, *PolicyKind)])


@dataclass
class HungEngine(FakeEngine):
    """An engine that hangs in the calls for some adapters, and counts the calls that run at once."""

    hung: dict[str, asyncio.Event] = field(default_factory=dict)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        async with self._counted("load", name):
            await super().load(name, path, record, spare=spare)

    async def unload(self, name: str) -> None:
        async with self._counted("unload", name):
            await super().unload(name)

    @asynccontextmanager
    async def _counted(self, call: str, name: str) -> AsyncIterator[None]:
        self.running[call] += 1
        self.most[call] = max(self.most[call], self.running[call])
        try:
            await asyncio.sleep(0)
            if name.partition("@")[0] in self.hung:
                await self.hung[name.partition("@")[0]].wait()
            yield
        finally:
            self.running[call] -= 1


class Machine(RuleBasedStateMachine):
    """A replica without requests of its own that load: what is loaded is what the workers load."""

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.engine, self.revisions = HungEngine(), Counter[str]()
        self.rig = self.run(self.make())
        self.requests: dict[str, AsyncExitStack] = {}

    async def make(self) -> Rig:
        limits = Limits(Policy(ttl_s=60), None, resync_s=5, hold_timeout_s=5)
        return Rig(self.engine, FakeStager(), FakeVolume(), Clock(), limits)

    def run(self, work: Coroutine[None, None, Result]) -> Result:
        return self.runner.run(work)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.quiesce()
            self.runner.close()

    # -- what happens --------------------------------------------------------------------------

    @rule(names=SEVERAL, policy=POLICIES)
    def register(self, names: list[str], policy: Policy) -> None:
        for name in names:
            self.revisions[name] += 1
            self.rig.volume.put(name, f"v{self.revisions[name]}", policy)

    @rule(names=SEVERAL)
    def withdraw(self, names: list[str]) -> None:
        for name in names:
            self.rig.volume.remove(name)

    @rule(names=SEVERAL)
    def hang(self, names: list[str]) -> None:
        for name in names[: MOST_STUCK - len(self.engine.hung)]:
            self.engine.hung.setdefault(name, asyncio.Event())

    @precondition(lambda self: self.engine.hung)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.engine.hung.pop(data.draw(st.sampled_from(sorted(self.engine.hung)))).set()

    @rule(name=NAMES)
    def keep(self, name: str) -> None:
        self.engine.keeps ^= {name}

    @rule(name=NAMES)
    def refuse(self, name: str) -> None:
        if self.engine.refuses.pop(name, None) is None:
            self.engine.refuses[name] = EngineUnavailable("engine cannot load now (503)")

    @rule()
    def die_or_return(self) -> None:
        self.engine.up = not self.engine.up
        if not self.engine.up:
            self.engine.adapters.clear()

    @rule(name=NAMES)
    def ask(self, name: str) -> None:
        """A request begins for what is loaded, or the one under way ends."""
        self.run(self._ask(name))

    async def _ask(self, name: str) -> None:
        request = self.requests.pop(name, None)
        served = self.rig.replica.lookup(name)
        if request is not None:
            await request.aclose()
        elif served is not None and self.rig.replica._residents.name_of(served) is not None:
            self.requests[name] = AsyncExitStack()
            await self.requests[name].enter_async_context(self.rig.replica.hold(name, 5))

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.now += seconds
        self.run(self.rig.settle())

    # -- what holds ----------------------------------------------------------------------------

    @invariant()
    def bounded(self) -> None:
        """No more calls run at once than may."""
        assert self.engine.most["load"] <= UNASKED_LOADS
        assert self.engine.most["unload"] <= UNLOADS

    @rule()
    def others_follow(self) -> None:
        """What hangs, is refused or is in use delays no other adapter."""
        if self.engine.up:
            troubled = {*self.engine.hung, *self.engine.keeps, *self.engine.refuses, *self.requests}
            self._follows(troubled)

    @rule()
    def quiesce(self) -> None:
        """Once nothing is wrong any more, what is loaded is what is planned, whatever happened before."""
        for event in self.engine.hung.values():
            event.set()
        self.engine.hung.clear()
        self.engine.keeps.clear()
        self.engine.refuses.clear()
        self.engine.up = True
        for name in list(self.requests):
            self.ask(name)
        self._follows(set())

    def _follows(self, troubled: set[str]) -> None:
        for _ in range(3):  # an unload's delay, then a load's
            self.rig.clock.now += CEILING_S + 1
            self.run(self.rig.settle())
        planned = {
            self.rig.stager.path(one)
            for one in self.rig.volume.desired.records.values()
            if one.present
            and one.revision == f"v{self.revisions[one.name]}"
            and one.spec.policy is not None
            and one.spec.policy.kind in ALWAYS
            and one.name not in troubled
        }
        loaded = {
            path for name, path in self.engine.adapters.items() if name.partition("@")[0] not in troubled
        }
        assert loaded == planned


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWorkers = Machine.TestCase
