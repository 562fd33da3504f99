"""Wait for something only visible by looking again: another process's answer over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

from lora_fs.demo.failures import DemoFailed

_LOOK_INTERVAL_S = 0.02


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
        time.sleep(_LOOK_INTERVAL_S)
    return time.monotonic() - began
