"""A worker per adapter: whatever one adapter's calls do, the others' are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from lora_fs.sidecar.errors import WaitTimeout
from lora_fs.sidecar.model import AdapterKey, Phase, Policy, PolicyKind, ReplicaStatus, Scope, public_of
from lora_fs.sidecar.reconcile import status_file
from lora_fs.sidecar.reconcile.admin.service import Registrations
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.reconcile.worker import Kind, Work, Workers
from lora_fs.sidecar.registry.format.sealed import decode
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine, Rig
from tests.registry.conftest import write_adapter
from tests.registry.test_operations import put

pytestmark = pytest.mark.anyio

MakeRig = Callable[..., Rig]
EAGER = Policy(kind=PolicyKind.EAGER)
PINNED = Policy(kind=PolicyKind.PINNED)
BOUND_S = 60


async def use(rig: Rig, *names: str) -> None:
    """One request for each, from start to end."""
    for name in names:
        async with rig.replica.hold(name, 5):
            rig.clock.now += 1


async def until(true: Callable[[], bool]) -> None:
    """Let other tasks and threads run until it is so."""
    while not true():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_an_unload_that_hangs_holds_up_nobody(make_rig: MakeRig) -> None:
    """The pass goes on, the others are unloaded and loaded, and what hangs is Draining until it is gone."""
    rig = make_rig()
    for name in ("a", "b", "c"):
        rig.volume.put(name)
    await use(rig, "a", "b", "c")
    rig.engine.stuck = {"a"}
    for name in ("a", "b"):
        rig.volume.remove(name)
    rig.volume.put("new", policy=EAGER)
    async with asyncio.timeout(BOUND_S):
        await rig.settle()
        assert rig.engine.public() == {"a", "c", "new"}
        assert rig.replica.notable()[0]["a"].phase is Phase.DRAINING
        assert rig.replica.readiness().ready
        rig.engine.unstick.set()
        await rig.settle()
    assert rig.engine.public() == {"c", "new"}
    assert rig.engine.unloads == ["a", "b"]


async def test_a_load_that_hangs_holds_up_none_of_200(make_rig: MakeRig) -> None:
    """200 eager adapters load beside one whose load never ends, at most four of them at once."""
    rig = make_rig()
    rig.engine.stuck, most, now = {"stuck"}, 0, 0
    load = rig.engine.load

    async def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        try:
            await asyncio.sleep(0)
            await load(*args, **kwargs)
        finally:
            now -= 1

    rig.engine.load = counted  # type: ignore[method-assign]
    rig.volume.put("stuck", policy=Policy(kind=PolicyKind.EAGER, priority=1))
    for number in range(200):
        rig.volume.put(f"a{number}", policy=EAGER)
    async with asyncio.timeout(BOUND_S):
        await rig.replica.reconcile()
        await until(lambda: len(rig.engine.adapters) == 200)
    assert (rig.engine.reads, most) == (1, 4), "one pass is enough"
    rig.engine.unstick.set()
    await rig.settle()
    assert "stuck" in rig.engine.public()


async def test_what_is_no_longer_decided_never_begins(make_rig: MakeRig) -> None:
    """It waits for a place, and is withdrawn meanwhile."""
    rig = make_rig()
    rig.engine.gate.clear()
    for number in range(6):
        rig.volume.put(f"a{number}", policy=EAGER)
    await rig.settle()
    assert len(rig.engine.loads) == 4
    rig.volume.remove("a4")
    await rig.settle()
    rig.engine.gate.set()
    await rig.settle()
    assert rig.engine.loads == ["a0", "a1", "a2", "a3", "a5"]


async def test_an_engine_that_dies_in_the_middle(make_rig: MakeRig) -> None:
    """Nothing more begins until it answers; then it gets what is planned, and nothing else."""
    rig = make_rig()
    rig.volume.put("gone")
    await use(rig, "gone")
    rig.volume.remove("gone")
    for number in range(9):
        rig.volume.put(f"a{number}", policy=EAGER)
    rig.engine.gate.clear()
    await rig.settle()
    rig.engine.up = False
    rig.engine.gate.set()
    rig.engine.adapters.clear()
    await rig.settle()
    assert len(rig.engine.loads) == 5
    assert not rig.replica.readiness().ready
    rig.engine.up = True
    for _ in range(4):
        rig.clock.now += 2
        await rig.settle()
    assert rig.engine.public() == {f"a{number}" for number in range(9)}


async def test_an_unload_that_fails_waits_out_growing_delays(make_rig: MakeRig) -> None:
    """It is not tried at every pass: about 1, 2, 4 and 8 s apart, and it stays loaded meanwhile."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.engine.keeps = {"a"}
    rig.volume.remove("a")
    tried: list[float] = []
    for _ in range(200):
        before = len(rig.engine.unloads)
        await rig.settle()
        tried += [rig.clock.now] * (len(rig.engine.unloads) - before)
        rig.clock.now += 0.1
    apart = [round(later - earlier, 1) for earlier, later in pairwise(tried)]
    assert len(apart) == 4
    assert all(0.75 * 2**n <= one <= 2**n + 0.1 for n, one in enumerate(apart))
    rig.engine.keeps.clear()
    rig.clock.now += 16
    await rig.settle()
    assert rig.engine.adapters == {}


@pytest.mark.parametrize("ends", [False, True], ids=["cancelled", "ended as it was cancelled"])
async def test_a_replica_that_ends_begins_nothing_more(ends: bool) -> None:
    """Its call under way is cancelled, and what waits for that one's place never begins."""
    workers, begun = Workers({Kind.UNLOAD: 1, Kind.LOAD: 1}), list[str]()

    def hang(name: str) -> Work:
        async def work() -> None:
            begun.append(name)
            with suppress(asyncio.CancelledError) if ends else nullcontext():
                await asyncio.Event().wait()

        return work

    failures = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    workers.follow({Kind.LOAD: {"a": hang("a"), "b": hang("b")}})
    await asyncio.sleep(0)
    [running] = (task for task in asyncio.all_tasks() if task.get_name() == "load a")
    workers.stop()
    async with asyncio.timeout(BOUND_S):
        await asyncio.wait({running})
    for _ in range(3):
        await asyncio.sleep(0)
    assert (begun, failures) == (["a"], [])


async def test_a_worker_that_breaks(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """An error that nobody expects is logged, the others' work is done, and the next pass tries again."""
    rig, broken = make_rig(), True
    for name in ("a", "b"):
        rig.volume.put(name)
    await use(rig, "a", "b")
    unload = rig.engine.unload

    async def breaks(name: str) -> None:
        if public_of(name) == "a" and broken:
            raise ZeroDivisionError
        await unload(name)

    rig.engine.unload = breaks  # type: ignore[method-assign]
    for name in ("a", "b"):
        rig.volume.remove(name)
    await rig.settle()
    assert rig.engine.public() == {"a"}
    assert "a worker failed; the next pass decides again" in caplog.text
    broken = False
    await rig.settle()
    assert rig.engine.adapters == {}


async def test_where_an_unload_hangs_another_makes_room(make_rig: MakeRig) -> None:
    """The least recently used has its place until it is gone: the next one is evicted for the pinned one."""
    rig = make_rig(max_loaded=3)
    for name in ("a", "b", "c"):
        rig.volume.put(name)
    await use(rig, "a", "b", "c")
    rig.engine.stuck = {"a"}
    rig.volume.put("pinned", policy=PINNED)
    async with asyncio.timeout(BOUND_S):
        await rig.settle()
    assert rig.engine.public() == {"a", "c", "pinned"}


async def test_who_waits_for_an_unload_asks_nobody(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is read for a pass alone, however long a last request takes to drain."""
    rig, turn = make_rig(), asyncio.sleep
    rig.volume.put("a")

    class Withdraws:
        async def unregister(self, lora_name: str, *_: object) -> None:
            rig.volume.remove(lora_name)

    rig.replica._registrations = cast("Registrations", Withdraws())

    async def at_once(_: float) -> None:
        await turn(0)

    monkeypatch.setattr(asyncio, "sleep", at_once)
    loop = asyncio.create_task(rig.replica.run())
    async with asyncio.timeout(BOUND_S), AsyncExitStack() as request:
        await request.enter_async_context(rig.replica.hold("a", 5))
        for _ in range(500):
            await turn(0)
        before = rig.engine.reads
        unloading = asyncio.create_task(rig.replica.unload_adapter("a", writer="test"))
        for _ in range(500):
            await turn(0)
        assert not unloading.done()
        assert rig.engine.reads <= before + 2
        await request.aclose()
        await unloading
    assert rig.engine.adapters == {}
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)


async def test_an_unload_that_does_not_end_is_waited_for_no_longer_than_bounded(make_rig: MakeRig) -> None:
    """The caller learns that the name is withdrawn, and that the engine still has it."""
    rig = make_rig()
    rig.volume.put("a")
    await use(rig, "a")
    rig.engine.stuck = {"a"}

    async def unregister(lora_name: str, *_: object) -> None:
        rig.volume.remove(lora_name)

    rig.replica._registrations.unregister = unregister  # type: ignore[assignment]
    rig.replica._limits = rig.limits.__class__(Policy(), None, resync_s=5, hold_timeout_s=0.05)
    with pytest.raises(WaitTimeout, match=r"a is withdrawn; .*the engine has not unloaded it") as late:
        await rig.replica.unload_adapter("a", writer="test")
    assert late.value.wrote == "a"


async def test_an_unload_waits_for_every_revision(make_rig: MakeRig) -> None:
    """A client asked for a revision by name: the engine has it until its request ends."""
    rig = make_rig()
    rig.volume.put("a")

    async def unregister(lora_name: str, *_: object) -> None:
        rig.volume.remove(lora_name)

    rig.replica._registrations.unregister = unregister  # type: ignore[assignment]
    rig.replica._limits = rig.limits.__class__(Policy(), None, resync_s=5, hold_timeout_s=0.05)
    await rig.settle()
    async with rig.replica.hold("a@v1", 5):
        with pytest.raises(WaitTimeout, match="a is withdrawn"):
            await rig.replica.unload_adapter("a", writer="test")
    await rig.settle()
    assert rig.engine.adapters == {}


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        (("default",), ("default", "team-b"), {"sql", "default"}),
        (("default", "team-b"), ("default",), {"default/sql", "default/default"}),
    ],
)
async def test_names_from_before_the_namespaces_changed(
    make_rig: MakeRig, before: tuple[str, ...], after: tuple[str, ...], gone: set[str]
) -> None:
    """They lie under this replica's stage folder and nobody can ask for them: idle, they are unloaded."""
    rig = make_rig()
    for name in ("sql", "default"):
        rig.volume.put(name)
    rig.replica = rig.start(before)
    await rig.settle()
    await use(rig, *gone)
    assert rig.engine.public() == gone
    rig.engine.adapters["theirs"] = "/elsewhere/theirs"
    rig.engine.busy = set(gone)
    rig.replica = rig.start(after)
    await rig.settle()
    assert rig.engine.public() == {*gone, "theirs"}
    rig.engine.busy.clear()
    await rig.settle()
    assert rig.engine.public() == {"theirs"}


async def test_the_hosts_time_moves_no_delay(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set back an hour and forward a year: nothing is tried, evicted or believed idle for it."""
    rig = make_rig()
    for name in ("idle", "bad"):
        rig.volume.put(name)
    await use(rig, "idle")
    rig.engine.keeps, real = {"bad"}, time.time
    await use(rig, "bad")
    rig.volume.remove("bad")
    await rig.settle()
    for jump_s in (-3600.0, 365 * 86_400.0):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: real() + jump_s)
        await rig.settle()
        assert (rig.engine.unloads, rig.engine.loads) == (["bad"], ["idle", "bad"])
    rig.clock.now += 1
    await rig.settle()
    assert rig.engine.unloads == ["bad", "bad"]


async def test_the_heartbeat_goes_on_while_an_unload_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica whose engine does not come back from a call is not taken for dead."""
    monkeypatch.setattr(status_file, "HEARTBEAT_S", 0.1)
    scope, engine = Scope("default", "tiny"), FakeEngine()
    registry = Registry(tmp_path / "root", create=True)
    put(registry, scope, write_adapter(tmp_path / "a"), name="a", revision="v1")
    settings = Settings(
        root=tmp_path / "root", model="tiny", stage_dir=tmp_path / "stage", replica_id="r0", resync_s=0.05
    )
    made = await assemble(settings, Expectation(("tiny",)), engine)

    def heartbeat() -> int:
        with suppress(FileNotFoundError):
            return decode(ReplicaStatus, registry.layout.replica("r0").read_bytes()).heartbeat
        return 0

    async with asyncio.timeout(BOUND_S), made.running():
        await until(lambda: AdapterKey(*scope, "v1", "a") in made.volume.desired.records)
        async with made.replica.hold("a", BOUND_S):
            engine.stuck = {"a"}
        release.unregister(registry, scope, "a", writer="test")
        await until(lambda: engine.unloads == ["a"])
        await until(lambda: heartbeat() > 0)
        seen = heartbeat()
        await until(lambda: heartbeat() >= seen + 3)
        assert engine.public() == {"a"}
        engine.unstick.set()
