"""What happens within one turn of the event loop: answers that come together, locks that change hands."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from lora_fs.sidecar.model import Record
from tests.reconcile.conftest import Rig

MakeRig = Callable[..., Rig]

pytestmark = pytest.mark.anyio


async def test_a_load_that_has_just_ended_is_not_joined(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests get a 404 from an engine that was restarted, the second as the first's reload ends.

    Awaiting an ended load over and over would never let the event loop take it away.
    """
    rig = make_rig()
    rig.volume.put("sql")
    await rig.settle()
    answers = [asyncio.Event(), asyncio.Event()]
    reloads = 0

    async def request(not_found: asyncio.Event) -> None:
        async with rig.replica.hold("sql", 5):
            await not_found.wait()
        rig.replica.forget("sql")
        async with rig.replica.hold("sql", 5):
            pass

    requests = [asyncio.create_task(request(answer)) for answer in answers]
    await rig.settle()
    reloaded = asyncio.Event()

    async def load(name: str, path: str, record: Record) -> None:
        nonlocal reloads
        reloads += 1
        await reloaded.wait()
        rig.engine.adapters[name] = path

    monkeypatch.setattr(rig.engine, "load", load)
    answers[0].set()
    await rig.settle()
    assert reloads == 1
    reloaded.set()
    answers[1].set()
    await asyncio.gather(*requests)
    assert reloads == 2


async def test_a_request_that_comes_before_the_unloads_lock_keeps_the_adapter(make_rig: MakeRig) -> None:
    """To unload was decided, but a load of another revision has the lock first, and a stream began."""
    rig = make_rig()
    rig.volume.put("sql", "v1")
    await rig.settle()
    async with rig.replica.hold("sql", 5):
        pass
    residents, loading = rig.replica._residents, asyncio.Event()
    lock = residents._lock("sql")

    async def load_another() -> None:
        async with lock:
            await loading.wait()

    await lock.acquire()
    other = asyncio.create_task(load_another())
    await asyncio.sleep(0)
    unloading = asyncio.create_task(residents.unload("sql", "idle"))
    lock.release()
    await asyncio.sleep(0)
    async with rig.replica.hold("sql", 5) as name:
        loading.set()
        await asyncio.gather(other, unloading)
        assert name in rig.engine.adapters
