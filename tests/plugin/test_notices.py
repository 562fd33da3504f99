"""What workers say to API servers unasked: real sockets, and who is gone or elsewhere."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from pathlib import Path

import pytest

from lora_fs.worker_patch import notices
from lora_fs.worker_patch.notices import Listener, Notices

pytestmark = pytest.mark.anyio
FOR_EVER = 60.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_who_waits_hears_of_each_load_that_ends() -> None:
    """Of its adapter alone, from every worker."""
    listener = Listener(lambda adapter, reason: None)
    workers = [Notices(), Notices()]
    assert all(worker.reach("api", listener.path) for worker in workers)
    with listener.of(7) as waiting, listener.of(8) as other:
        ends = [("api 1", worker.name) for worker in workers]
        hears = asyncio.create_task(waiting.until(ends, FOR_EVER))
        workers[0].ended(7, "api 1", 10)
        workers[1].ended(9, "api 1", 10)
        workers[1].ended(7, "api 0", 10)
        await other.until(ends, 0.01)
        assert not hears.done(), "another load of that worker's ended, and another adapter's"
        workers[1].ended(7, "api 1", None)
        await hears
        assert {end: waiting.ended[end] for end in ends} == {ends[0]: 10, ends[1]: None}
        assert other.ended == {}
    assert listener._waiting == {}


async def test_a_notice_that_came_before_the_wait_counts() -> None:
    listener, worker = Listener(lambda adapter, reason: None), Notices()
    worker.reach("api", listener.path)
    with listener.of(7) as waiting:
        worker.ended(7, "api 1", 10)
        await waiting.until([("api 1", worker.name)], FOR_EVER)
        await waiting.until([("api 1", worker.name)], FOR_EVER)
        await waiting.until([("api 2", worker.name)], 0.01)
        assert waiting.ended == {("api 1", worker.name): 10}


async def test_a_step_without_the_weights_is_heard_of_with_its_reason() -> None:
    heard = asyncio.get_running_loop().create_future()
    listener, worker = Listener(lambda *said: heard.set_result(said)), Notices()
    worker.reach("api", listener.path)
    worker.blank(7, "no memory" + 5000 * "!")
    adapter, reason = await asyncio.wait_for(heard, FOR_EVER)
    assert (adapter, reason[:9], len(reason)) == (7, "no memory", 1000)


async def test_a_reason_in_any_script_is_heard_of() -> None:
    """JSON takes 12 bytes for each of these characters."""
    heard = asyncio.get_running_loop().create_future()
    listener, worker = Listener(lambda *said: heard.set_result(said)), Notices()
    worker.reach("api", listener.path)
    worker.blank(7, 2000 * "\N{GRINNING FACE}")
    assert await asyncio.wait_for(heard, FOR_EVER) == (7, 1000 * "\N{GRINNING FACE}")


async def test_a_server_that_is_busy_hears_of_all_later() -> None:
    """Eight workers notify it between two turns of its loop, of more than the kernel queues for it."""
    heard, all_of_them = set[int](), asyncio.Event()

    def blank(adapter: int, reason: str) -> None:
        heard.add(adapter)
        if len(heard) == 40:
            all_of_them.set()

    listener, workers = Listener(blank), [Notices() for _ in range(8)]
    for worker in workers:
        worker.reach("api", listener.path)
    for adapter in range(40):
        workers[adapter % 8].blank(adapter, "no memory")
    await asyncio.wait_for(all_of_them.wait(), FOR_EVER)


async def test_a_server_that_hangs_keeps_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits for it, and no end of a worker for long."""
    monkeypatch.setattr(notices, "PATIENCE_S", 1)
    listener, hangs, worker = Listener(lambda *said: None), Listener(lambda *said: None), Notices()
    asyncio.get_running_loop().remove_reader(hangs._socket)
    assert worker.reach("hangs", hangs.path)
    assert worker.reach("api", listener.path)
    with listener.of(7) as waiting:
        for load in range(100):
            worker.ended(7, f"api {load}", 10)
        await waiting.until([(f"api {load}", worker.name) for load in range(100)], FOR_EVER)
        assert len(waiting.ended) == 100
    await asyncio.to_thread(worker._late.shutdown)
    assert worker._listeners == {"api": listener.path}


async def test_a_server_that_is_gone_or_elsewhere() -> None:
    """Nobody is notified there, and nothing fails; the next one at that name is."""
    worker, listener = Notices(), Listener(lambda adapter, reason: None)
    assert not worker.reach("api", "")
    assert not worker.reach("api", "/on/another/machine")
    assert worker.reach("api", listener.path)
    os.unlink(listener.path)
    worker.ended(7, "api 1", 10)
    again = Listener(lambda adapter, reason: None)
    worker.reach("api", again.path)
    with again.of(7) as waiting:
        worker.ended(7, "api 2", 10)
        await waiting.until([("api 2", worker.name)], FOR_EVER)
        assert waiting.ended == {("api 2", worker.name): 10}


@pytest.mark.parametrize(
    "notice", [b"", b"{", b"[]", b"7", b'{"blank": 7}', b'{"ended": {}}', b'{"ended": 7}', b"\xff"]
)
async def test_what_is_no_notice_is_ignored(notice: bytes) -> None:
    listener, worker = Listener(lambda adapter, reason: pytest.fail(reason)), Notices()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(notice, listener.path)
    worker.reach("api", listener.path)
    with listener.of(7) as waiting:
        worker.ended(7, "api 1", 10)
        await waiting.until([("api 1", worker.name)], FOR_EVER)
        assert waiting.ended == {("api 1", worker.name): 10}


async def test_what_cannot_be_sent_fails_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An error there would end the engine."""
    worker, path = Notices(), str(tmp_path / "other")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.bind(path)
        stranger.listen()
        assert worker.reach("api", path)
        worker.blank(7, "no memory")
    assert "was not notified" in caplog.text


def test_its_folder_goes_with_its_loop(tmp_path: Path) -> None:
    async def listen() -> None:
        assert Listener(lambda *said: None, beside=str(tmp_path)).path.startswith(str(tmp_path))

    asyncio.run(listen())
    gc.collect()
    assert list(tmp_path.iterdir()) == []


async def test_its_folder_is_the_users_alone() -> None:
    """Another user of the machine ends no answers."""
    listener = Listener(lambda adapter, reason: None)
    assert os.stat(os.path.dirname(listener.path)).st_mode & 0o77 == 0
