"""Calls that hang cost so many threads, and whoever comes then an error in time."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import anyio
import anyio.to_thread
import pytest

from lora_fs.sidecar.concurrency import AllTaken, Daemons, Threads
from tests.registry.test_growth import calls_of

pytestmark = pytest.mark.anyio

SOON_S = 0.05
BOUND_S = 60
ENDS = """
import asyncio, atexit, sys, threading
from lora_fs.sidecar.concurrency import Daemons, Threads

async def give_up():
    pool, hang = Daemons(1, "pool"), threading.Event()
    for hanging in (Threads(1).run(hang.wait, 0.05), asyncio.wait_for(pool.run(hang.wait), 0.05)):
        try:
            await hanging
        except TimeoutError:
            print("gave up")

atexit.register(print, "at exit")
asyncio.run(give_up())
sys.exit(3)
"""


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What calls wait for; they end with the test."""
    event = threading.Event()
    yield event
    event.set()


async def test_no_more_than_so_many_hang(hang: threading.Event) -> None:
    """However many callers give up; who was not begun is told so, and is not begun later."""
    threads, begun = Threads(2), threading.Semaphore(0)

    def call() -> None:
        begun.release()
        hang.wait(BOUND_S)

    told = []
    for _ in range(5):
        with pytest.raises(TimeoutError) as raised:
            await threads.run(call, SOON_S)
        told.append(raised.type)
    assert told == [TimeoutError, TimeoutError, AllTaken, AllTaken, AllTaken]
    hang.set()
    assert await threads.run(lambda: "done", BOUND_S) == "done"
    assert [begun.acquire(blocking=False) for _ in range(3)] == [True, True, False]


async def test_a_caller_that_is_cancelled_frees_no_thread(hang: threading.Event) -> None:
    """Its call goes on, and the place is free when that ends."""
    threads, begun = Threads(1), threading.Event()

    def call() -> None:
        begun.set()
        hang.wait(BOUND_S)

    async with anyio.create_task_group() as group:
        group.start_soon(threads.run, call, math.inf)
        await anyio.to_thread.run_sync(begun.wait, BOUND_S)
        group.cancel_scope.cancel()
    with pytest.raises(AllTaken):
        await threads.run(lambda: "begun", SOON_S)
    hang.set()
    assert await threads.run(lambda: "begun", BOUND_S) == "begun"


async def test_what_the_call_raises() -> None:
    """Is raised, a timeout of its own among it, and the thread is free again."""
    threads = Threads(1)

    def call(error: Exception) -> None:
        raise error

    for error in (ValueError("odd"), TimeoutError("its own")):
        with pytest.raises(type(error), match=str(error)):
            await threads.run(lambda error=error: call(error), BOUND_S)  # type: ignore[misc]


def test_a_process_that_ends_waits_for_none() -> None:
    """Of calls that hang: it ends at once, as any other does, with its own status."""
    command = [sys.executable, "-c", ENDS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (ended.stdout.split("\n"), ended.stderr) == (["gave up", "gave up", "at exit", ""], "")
    assert ended.returncode == 3


async def test_who_gives_up_before_it_begins(hang: threading.Event) -> None:
    """Has it not begun; the next is, and a failure is its caller's."""
    pool, begun = Daemons(1, "pool"), threading.Semaphore(0)
    first = asyncio.create_task(pool.run(lambda: hang.wait(BOUND_S)))
    second = asyncio.create_task(pool.run(begun.release))
    await asyncio.sleep(SOON_S)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    hang.set()
    assert await first
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert not begun.acquire(blocking=False)


def test_nothing_is_kept_of_those_that_gave_up(hang: threading.Event) -> None:
    """However many they were while all threads hang."""
    pool, hangs = Daemons(1, "pool"), threading.Event()

    def call() -> None:
        hangs.set()
        hang.wait(BOUND_S)

    pool.submit(call)
    assert hangs.wait(BOUND_S)
    for _ in range(100):
        given_up = pool.submit(print)
        assert given_up.cancel()
    assert not pool._waiting
    last = pool.submit(lambda: "done")
    hang.set()
    assert last.result(BOUND_S) == "done"


def test_one_more_call_costs_the_same_however_many_wait(hang: threading.Event) -> None:
    """All threads hang meanwhile, as those of a volume that does not answer."""
    pool = Daemons(1, "pool")
    pool.submit(hang.wait, BOUND_S)
    counts = [calls_of(lambda: pool.submit(print)) for _ in range(100)]
    assert counts[99] == counts[9], counts


async def test_an_idle_thread_does_the_next_call() -> None:
    """As long as there is one no other is started."""
    pool = Daemons(8, "pool")
    used = []
    for _ in range(5):
        used.append(await pool.run(threading.current_thread))
        await anyio.to_thread.run_sync(wait_until, lambda: pool._idle == 1)
    assert len(set(used)) == 1
    assert used[0].daemon


async def test_an_idle_thread_ends_after_its_time() -> None:
    """The next call has another one."""
    pool = Daemons(1, "pool", kept_s=SOON_S)
    for _ in range(2):
        thread = await pool.run(threading.current_thread)
        await anyio.to_thread.run_sync(thread.join, BOUND_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("idle", [0, 1, 3])
def test_calls_at_once_are_begun_at_once(hang: threading.Event, idle: int) -> None:
    """In idle threads and in new ones, up to the most; what is more waits for the first that is free."""
    pool, begun = Daemons(3, "pool"), threading.Semaphore(0)

    def call() -> threading.Thread:
        begun.release()
        hang.wait(BOUND_S)
        return threading.current_thread()

    together = threading.Barrier(max(1, idle))
    for future in [pool.submit(together.wait, BOUND_S) for _ in range(idle)]:
        future.result(BOUND_S)
    wait_until(lambda: pool._idle == idle)
    calls = [pool.submit(call) for _ in range(5)]
    assert all(begun.acquire(timeout=BOUND_S) for _ in range(3))
    assert not begun.acquire(timeout=SOON_S)
    hang.set()
    assert len({future.result(BOUND_S) for future in calls}) == 3


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)
