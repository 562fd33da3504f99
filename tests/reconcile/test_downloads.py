"""Downloads that callers share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from lora_fs.sidecar.errors import SourceUnavailable, WaitTimeout
from lora_fs.sidecar.reconcile.admin.fetch_jobs import (
    AT_ONCE,
    KEPT_S,
    MOST_KNOWN,
    SHARE,
    Busy,
    Downloads,
    begun,
)
from lora_fs.sidecar.reconcile.admin.fetching import CHECKING, Tell

pytestmark = pytest.mark.anyio

BOUND_S = 60


async def test_an_outcome_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who fetches it later leaves the one that was begun since as it is: that goes on, and is told."""
    downloads = Downloads(wait_s=BOUND_S)
    what, told = ("scope", "a"), begun("a", "default", "hf://a")
    go = [threading.Event(), threading.Event()]

    def numbered(number: int) -> Callable[[Tell, Callable[[], bool]], str]:
        def call(tell: Tell, _: Callable[[], bool]) -> str:
            go[number].wait(BOUND_S)
            tell(CHECKING, 1, 1)
            return f"outcome {number}"

        return call

    async def ask(number: int) -> str:
        return await downloads.run(what, told, numbered(number))

    real, late = asyncio.wait, asyncio.Event()

    async def wait(*args: Any, **kwargs: Any) -> Any:
        done = await real(*args, **kwargs)
        if asyncio.current_task() is lagging:
            await late.wait()
        return done

    monkeypatch.setattr(asyncio, "wait", wait)
    prompt, lagging = asyncio.create_task(ask(0)), asyncio.create_task(ask(0))
    await asyncio.sleep(0)
    go[0].set()
    assert await prompt == "outcome 0"
    second = asyncio.create_task(ask(1))
    await asyncio.sleep(0)
    late.set()
    assert await lagging == "outcome 0"
    assert downloads.under_way().keys() == {"a"}
    go[1].set()
    assert await second == "outcome 1"


@pytest.mark.parametrize("stands", [True, False])
async def test_an_outcome_that_nobody_fetched(stands: bool) -> None:
    """It is told if it still holds; else the work is done again, once for all who ask."""
    downloads = Downloads(wait_s=BOUND_S)
    what, told, go, calls = ("scope", "a"), begun("a", "default", "hf://a"), threading.Event(), []

    def call(*_: object) -> str:
        go.wait(BOUND_S)
        calls.append("called")
        return f"outcome {len(calls)}"

    async def look(_: str) -> bool:
        await asyncio.sleep(0)
        return stands

    downloads.wait_s = 0.0
    with pytest.raises(WaitTimeout):
        await downloads.run(what, told, call, look)
    ended = asyncio.Event()
    downloads.wake = ended.set
    go.set()
    await ended.wait()
    downloads.wait_s = BOUND_S
    found = await asyncio.gather(*(downloads.run(what, told, call, look) for _ in range(2)))
    assert found == ["outcome 1" if stands else "outcome 2"] * 2


async def abandon(
    downloads: Downloads, name: str, call: Callable[..., str], namespace: str = "default"
) -> None:
    """Ask for a download and leave before it ends."""
    downloads.wait_s = 0.0
    with pytest.raises(WaitTimeout):
        await downloads.run((namespace, name), begun(name, namespace, "hf://a"), call)
    downloads.wait_s = BOUND_S


async def test_what_ended_is_not_under_way() -> None:
    """Any number of outcomes that nobody collected leave room for new downloads; running ones do not.

    Another namespace's downloads take no room of these.
    """
    downloads, go = Downloads(wait_s=BOUND_S), threading.Event()
    ended = asyncio.Semaphore(0)
    downloads.wake = lambda: None if downloads.under_way() else ended.release()
    for number in range(MOST_KNOWN):
        await abandon(downloads, f"a{number}", lambda *_: "done" if go.wait(BOUND_S) else "late")
    with pytest.raises(Busy, match=f"{MOST_KNOWN} downloads of namespace default are under way"):
        await downloads.run(("scope", "b"), begun("b", "default", "hf://b"), lambda *_: "done")
    await abandon(downloads, "c", lambda *_: "done" if go.wait(BOUND_S) else "late", "other")
    go.set()
    await ended.acquire()
    assert await downloads.run(("scope", "b"), begun("b", "default", "hf://b"), lambda *_: "done") == "done"


async def test_slow_sources_of_a_namespace_leave_threads_to_others() -> None:
    """One namespace has SHARE downloads at once; a free place of its own goes to its next one."""
    downloads, go = Downloads(wait_s=BOUND_S, share=SHARE), threading.Event()
    running = threading.Semaphore(0)

    def slow(*_: object) -> str:
        running.release()
        return "done" if go.wait(BOUND_S) else "late"

    for number in range(AT_ONCE + 1):
        await abandon(downloads, f"a{number}", slow)
    what, told = ("other", "b"), begun("b", "other", "hf://b")
    assert await downloads.run(what, told, lambda *_: "fetched") == "fetched"
    assert [running.acquire(timeout=BOUND_S) for _ in range(SHARE)] == [True] * SHARE
    assert not running.acquire(blocking=False)
    go.set()
    last = ("default", f"a{AT_ONCE}")
    assert await downloads.run(last, begun(last[1], "default", "hf://a"), slow) == "done"


async def test_an_old_failure_is_not_an_answer() -> None:
    """A failure that nobody collected for KEPT_S is forgotten: the next caller gets a new try."""
    now = [0.0]
    downloads, ended = Downloads(wait_s=BOUND_S, clock=lambda: now[0]), asyncio.Event()
    go = threading.Event()

    def fail(*_: object) -> str:
        go.wait(BOUND_S)
        raise SourceUnavailable("the hub is away")

    await abandon(downloads, "a", fail)
    downloads.wake = ended.set
    go.set()
    await ended.wait()
    now[0] += KEPT_S + 1
    what, told = ("default", "a"), begun("a", "default", "hf://a")
    assert await downloads.run(what, told, lambda *_: "registered") == "registered"
