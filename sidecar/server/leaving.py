"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Made = TypeVar("Made")


async def while_it_waits(work: Coroutine[Any, Any, Made], receive: Receive) -> Made | None:
    """Do ``work`` in this task for as long as the client is there. Return what it makes; None: it left."""
    working, has_left = asyncio.current_task(), False
    assert working is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not has_left or working.uncancel() > 0:
            raise
        return None
    finally:
        watching.cancel()
