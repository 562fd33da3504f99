"""What the proxy reads of a body, without an event loop: each turn follows the one before."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import TypeVar

from lora_fs.sidecar.server.proxy import model_rewrite
from lora_fs.sidecar.server.proxy.json_fields import Body
from lora_fs.sidecar.server.proxy.model_rewrite import Fields, ModelField

T = TypeVar("T")


def at_once(work: Coroutine[None, None, T]) -> T:
    """Return what ``work`` does, which waits for nothing but its next turn."""
    return _timed(work)[0]


def in_turns(work: Callable[[], Coroutine[None, None, T]]) -> tuple[T, float, int]:
    """Do ``work`` three times; return its result, the longest turn in CPU seconds, and the number of turns.

    A turn does the same each time, and counts as the shortest one: a virtual machine's stolen time, and a
    collection of what else this process holds, are CPU time as well.
    """
    (result, first), (_, second), (_, third) = (_timed(work()) for _ in range(3))
    assert len(first) == len(second) == len(third)
    return result, max(map(min, first, second, third)), len(first)


def _timed(work: Coroutine[None, None, T]) -> tuple[T, list[float]]:
    turns = list[float]()
    while True:
        begun = time.thread_time()
        try:
            work.send(None)
        except StopIteration as end:
            return end.value, [*turns, time.thread_time() - begun]
        turns.append(time.thread_time() - begun)


def find_fields(content_type: str, body: Body) -> Fields:
    """``model_rewrite.find_fields`` at once."""
    return at_once(model_rewrite.find_fields(content_type, body))


def find_model(content_type: str, body: Body) -> ModelField | None:
    """The model that a body names; None if it names none."""
    found = find_fields(content_type, body)
    return found if isinstance(found, ModelField) else None
