"""Wait for something only visible by looking again: another process's answer over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

from lora_fs.demo.failures import DemoFailed

_SHORTEST_S, _LONGEST_S = 0.02, 0.1


class NeverHappened(DemoFailed):
    """What was waited for did not come true in time."""


def wait_until(what: str, holds: Callable[[], bool], *, timeout_s: float) -> float:
    """Look until ``holds()``; returns the seconds it took.

    Raises:
        NeverHappened: it did not hold within ``timeout_s``; says ``what``.
    """
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > timeout_s:
            raise NeverHappened(f"{what}: not within {timeout_s:g} s")
        time.sleep(pause_s(began))
    return time.monotonic() - began


def pause_s(began: float) -> float:
    """Return how long to wait before the next look: a tenth of the time since ``began``, within bounds.

    Each look is a request, which takes the processor from what is waited for.
    """
    return min(_LONGEST_S, max(_SHORTEST_S, (time.monotonic() - began) / 10))
