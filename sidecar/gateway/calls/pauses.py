"""Pauses of the fleet, and that each one ends at every replica.

A replica's pause ends at ``/resume`` alone. A replica that is out at that moment misses the call. One that
hangs may carry out a ``/pause`` that the gateway has given up. So the gateway keeps each ``/resume`` in
memory for KEEP_S, and repeats it at a replica that missed it, before that replica gets requests again.

Gateways side by side do not undo each other's pauses: if the replicas that took the ``/resume`` pause again,
a newer ``/pause`` came by another gateway, and the kept call is void.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn
from urllib.parse import urlencode

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lora_fs.sidecar.gateway.calls.asking import Asking, Call, Headers, Said, failed, read, together
from lora_fs.sidecar.logs import event

KEEP_S: Final = 3600.0
RESUME_S: Final = 5.0  # in which a replica answers a /resume
LATE_S: Final = 5.0  # after it woke, in which a replica carries out what it was sent while it hung
LOOK_S: Final = 2.0  # in which a replica says whether it pauses
RETRY_S: Final = 1.0  # then twice as long each time
MOST_RETRY_S: Final = 60.0
MOST_KEPT: Final = 64
WITNESSES: Final = 2
ALL: Final = "*"  # as a replica lists a pause of everything

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Resume:
    """A ``/resume`` that a replica took. Replicas are named by URL: an id may move to another one.

    Attributes:
        headers: the caller's.
        until: when the gateway forgets the call, on the loop's clock.
        done: the replicas that need it no more.
        late: replicas that may yet carry out a ``/pause``, and until when.
        retry: when to ask a replica again that failed the call, and how many seconds it waited so far.
    """

    number: int
    path: str
    headers: Headers
    until: float
    done: set[str]
    late: dict[str, float] = field(default_factory=dict)
    retry: dict[str, tuple[float, float]] = field(default_factory=dict)

    def is_missed(self, url: str, now: float) -> bool:
        """Return whether a replica must still take the call."""
        return url not in self.done and self.retry.get(url, (0.0, 0.0))[0] <= now

    def took(self, url: str, now: float) -> None:
        """Note that a replica took the call."""
        self.done.add(url)
        if url in self.late:
            self.late[url] = min(self.late[url], now + LATE_S)

    def failed_at(self, url: str, now: float) -> None:
        """Note that a replica failed the call: another try may go well."""
        pause_s = min(2 * self.retry.get(url, (0.0, RETRY_S / 2))[1], MOST_RETRY_S)
        self.retry[url] = now + pause_s, pause_s

    def is_void_at(self, url: str) -> None:
        """Note that a replica's pause is newer than the call."""
        self.done.add(url)
        self.late.pop(url, None)


class Pauses:
    """``/pause`` and ``/resume`` of every replica."""

    def __init__(self, asking: Asking) -> None:
        self._asking, self._watch = asking, asking.watch
        self._kept: dict[str, Resume] = {}  # by the adapter's name, or ALL
        self._number = self._under_way = 0
        self._watch.catch_up = self.catch_up

    async def pause(self, request: Request, headers: Headers) -> Response:
        """Pause every ready replica, or none."""
        key, began = request.query_params.get("lora_name", ALL), self._number
        self._under_way += 1
        try:
            path = f"/pause?{request.url.query}"
            told = await self._asking.all(self._asking.ready(), Call("POST", path, headers))
        finally:
            self._under_way -= 1
        refused = self._asking.refused(told)
        if refused or self._is_resumed_since(key, began):
            await self._undo(key, told, refused, headers)
        for one in [*self._kept] if key == ALL else [key]:
            self._kept.pop(one, None)
        return together(told)

    async def resume(self, request: Request, headers: Headers) -> Response:
        """Resume every replica: now, or once it answers. Asks each one, whatever another one answers."""
        key, path = request.query_params.get("lora_name", ALL), f"/resume?{request.url.query}"
        call = Call("POST", path, headers, timeout_s=RESUME_S)
        told = await self._asking.all(self._asking.ready(), call)
        done = [one for one in told if one.is_done]
        if done:
            self._keep(key, path, headers, done)
        if refused := [one for one in told if one.has_answered and not one.is_done]:
            raise failed(refused, (), "the other replicas go on")
        if not done:
            raise failed(told, (), "ask again")
        out = (one for one in self._watch.seen.values() if one.why and not one.is_other)
        missed = {one.name or one.url: one.why for one in out}
        missed |= {one.replica: one.why for one in told if not one.has_answered}
        return together(done, not_reached=missed)

    async def catch_up(self, url: str, told: Mapping[str, Any]) -> None:
        """Repeat each ``/resume`` that a replica missed.

        Args:
            told: what its ``/metadata`` says now.
        Raises:
            TimeoutError: it does not answer.
        """
        now = asyncio.get_running_loop().time()
        for key, resume in [*self._kept.items()]:
            if now >= resume.until:
                self._kept.pop(key, None)
            elif resume.is_missed(url, now) or (
                now < resume.late.get(url, -math.inf) and not self._under_way and _may_pause(key, told)
            ):
                await self._repeat(key, resume, url, str(told.get("replica")))

    async def _repeat(self, key: str, resume: Resume, url: str, name: str) -> None:
        if await self._is_paused_again(key, resume):
            resume.is_void_at(url)
            return
        call = Call("POST", resume.path, resume.headers, timeout_s=RESUME_S)
        said = await self._asking.at(url, name, call)
        now, told = asyncio.get_running_loop().time(), event("gateway.resumed", url=url)
        if not said.has_answered:
            raise TimeoutError(said.why)
        if not said.is_done:
            logger.warning("a /resume that a replica missed: %s", said.why, extra=told)
        elif url not in resume.done:
            logger.info("replica %s has taken the /resume that it missed", name, extra=told)
        if said.status >= 500:
            resume.failed_at(url, now)
        else:
            resume.took(url, now)

    async def _is_paused_again(self, key: str, resume: Resume) -> bool:
        """Return whether a replica that took the ``/resume`` pauses: by a newer call, of another gateway."""
        took = [
            one for one in self._watch.ready if self._watch.url_of(one) in resume.done - resume.late.keys()
        ]
        look = Call("GET", "/metadata", resume.headers, timeout_s=LOOK_S)
        told = await self._asking.all(sorted(took)[:WITNESSES], look)
        return any(_is_paused(key, read(one)) for one in told if one.is_done)

    def _is_resumed_since(self, key: str, began: int) -> bool:
        """Return whether a ``/resume`` overtook a ``/pause`` that began at ``began``."""
        kept = [self._kept.get(one) for one in (key, ALL)]
        return any(one is not None and one.number > began for one in kept)

    async def _undo(
        self, key: str, told: Sequence[Said], refused: Sequence[Said], headers: Headers
    ) -> NoReturn:
        path = "/resume" + ("?" + urlencode({"lora_name": key}) if key != ALL else "")
        paused = [one.replica for one in told if one.is_done]
        undone = await self._asking.all(paused, Call("POST", path, headers, timeout_s=RESUME_S))
        late = [one.replica for one in told if one.status and not one.has_answered]
        late += [one.replica for one in undone if not one.has_answered]
        outcome = "no replica is paused"
        if paused:
            answered = [one for one in told if one.has_answered and not one.is_done]
            self._keep(key, path, headers, [*answered, *undone], late)
            if late:
                outcome = (
                    f"no other replica is paused, and the gateway resumes {', '.join(late)} once it answers"
                )
        elif late:
            outcome = f"{', '.join(late)} may be paused: POST /resume once it answers"
        if not refused:
            raise HTTPException(409, f"a POST /resume came while this call waited: {outcome}")
        raise failed(refused, [one for one in undone if one.has_answered], outcome)

    def _keep(
        self, key: str, path: str, headers: Headers, done: Sequence[Said], late: Sequence[str] = ()
    ) -> None:
        """Keep a ``/resume``, of which a replica accepted the caller.

        Args:
            done: the replicas that answered. One that answered with an error of its own is asked again.
            late: replicas that may yet carry out the ``/pause``.
        """
        for one in [*self._kept] if key == ALL else [key]:
            self._kept.pop(one, None)
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        self._number += 1
        until = asyncio.get_running_loop().time() + KEEP_S
        answered = {self._watch.url_of(one.replica) for one in done if one.has_answered and one.status < 500}
        may_pause = {self._watch.url_of(one): math.inf for one in late}
        self._kept[key] = Resume(self._number, path, dict(headers), until, answered, may_pause)


def _may_pause(key: str, told: Mapping[str, Any]) -> bool:
    """Return False if a replica says that it has no pause ``key``. It names no adapter to every caller."""
    paused = told.get("paused")
    return not (key == ALL and isinstance(paused, list) and ALL not in paused)


def _is_paused(key: str, told: Any) -> bool:
    """Return whether a replica's ``/metadata`` lists the pause ``key``. An older version lists none."""
    paused = told.get("paused") if isinstance(told, dict) else None
    if not isinstance(paused, list):
        return False
    return key in paused or ("/" not in key and any(str(one).rpartition("/")[2] == key for one in paused))
