"""The replicas of a fleet: where they are, whether they are ready, and what they hold. Polls each one.

A replica is in once it answered that it is ready, and out at once when it takes no connection. It is also out
when it says that it is not ready, after MISSED polls without an answer, and when it left the list.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from lora_fs.sidecar.concurrency import Daemons
from lora_fs.sidecar.errors import LoraFsError, TemporaryError
from lora_fs.sidecar.gateway.discovery import MAX_REPLICAS, Discovery
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.server.middleware.access import HEADER
from lora_fs.sidecar.server.proxy.upstream import whole

FIND_S: Final = 1.0
POLL_S: Final = 0.5
POLLS_PER_S: Final = 100  # of all replicas together: with more than 50, each gets fewer
ANSWER_S: Final = 2.0
TOKEN_S: Final = 5.0  # in which the token file is read
MISSED: Final = 2
MOST_BYTES: Final = 16 << 20
MOST_TEXT: Final = 1_000
MOST_COUNT: Final = 1 << 31  # of adapters, or of requests
MOST_IDS: Final = 4 * MAX_REPLICAS  # of replicas, those that left among them
NO_FILES: Final = frozenset({errno.EMFILE, errno.ENFILE})  # the gateway's own limit, and no replica's fault
NO_MORE: Final = "the gateway may open no more connections (ulimit -n)"
# What reading an answer raises that is no replica's.
WRONG: Final = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)

logger = logging.getLogger(__name__)


class TokenRefused(ValueError):
    """A replica does not know the token that it was shown."""


@dataclass(slots=True)
class Seen:
    """One replica. ``why``: what keeps it out; empty if it is in.

    Attributes:
        name: the replica's id, as it said; None until it answered.
        model: the folder of its base model's scopes, as it said last; empty until it answered.
        base_names: of the base model, as it said last.
        version: of lora-fs there. engine_version: of its engine. None: it did not say.
        loaded: copies in its engine; capacity: those it may hold; None: unbounded, or it did not say.
        queue: how many requests run in its engine, and wait there, as it said last. None: it did not say.
        answered_at: when it answered last, on the watch's clock.
        is_other: it is no replica of this fleet, or a second address of one, by its last answer.
        refuses_token: it does not know the gateway's token, by its last answer.
    """

    url: str
    name: str | None = None
    why: str = "it was not asked yet"
    missed: int = 0
    digests: dict[str, str] = field(default_factory=dict)
    loaded: int = 0
    capacity: int | None = None
    model: str = ""
    base_names: frozenset[str] = frozenset()
    version: str | None = None
    engine_version: str | None = None
    queue: tuple[int, int] | None = None
    answered_at: float | None = None
    is_other: bool = False
    refuses_token: bool = False


class Watch:
    """Keeps a router's replicas up to date.

    Args:
        headers: sent with each poll: the token that the gateway shows.
        token: reads that token anew, since somebody may replace it; None: the gateway shows none. Blocking.
        model: the folder of the base model's scopes; None: that of the replica that answered first, as long
            as a replica serves it.

    Attributes:
        headers: as in Args.
        seen: the replicas by URL.
        base_names: of the base model, as clients may send them: what each replica said last.
        problem: why the list of replicas, or the token, is not read; empty if both are.
        catch_up: called with the URL and the ``/metadata`` of a replica that answers, before it gets
            requests. Raises TimeoutError if the replica does not answer. None: it missed nothing.
    """

    def __init__(
        self,
        router: Router,
        discovery: Discovery,
        clock: Callable[[], float],
        *,
        headers: Mapping[str, str],
        token: Callable[[], str] | None = None,
        model: str | None = None,
    ) -> None:
        self._router, self._discovery, self._clock = router, discovery, clock
        self.headers, self._token = dict(headers), token
        self._model, self._is_given = model, model is not None
        self._threads = Daemons(1, "lora-fs-gateway-token")
        self._lacks_files = False
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._holders: dict[str, str] = {}  # replica's id → its URL, the one that answered last at the end
        self.seen: dict[str, Seen] = {}
        self.base_names: frozenset[str] = frozenset()
        self.problem = "the list of replicas was not read yet"
        self.catch_up: Callable[[str, Mapping[str, Any]], Awaitable[None]] | None = None

    @asynccontextmanager
    async def running(self, session: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Find and poll the replicas inside the block."""
        finding = asyncio.create_task(self._find(session), name="find replicas")
        try:
            yield
        finally:
            tasks = [finding, *self._polls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def ready(self) -> frozenset[str]:
        """The ids of the replicas that are in."""
        return self._router.ready

    def url_of(self, name: str) -> str:
        """Return the URL of a replica that is in, or was in lately."""
        return self._holders[name]

    def digest_of(self, adapter: str) -> str:
        """Return the digest of an adapter at a replica that is in; its name where none has it."""
        for one in self.seen.values():
            if not one.why and (digest := one.digests.get(adapter)) is not None:
                return digest
        return adapter

    def not_reached(self, name: str, why: str) -> None:
        """Take out a replica that took no request; the next poll that it answers brings it back."""
        url = self._holders.get(name)
        if url is not None and url in self.seen:
            self._out(self.seen[url], why)

    async def _find(self, session: aiohttp.ClientSession) -> None:
        async def replicas() -> None:
            self._take(session, await self._discovery.find())

        while True:
            whys = [await self._why(replicas), await self._why(self._read_token)]
            self.problem = "; ".join(filter(None, whys))
            await asyncio.sleep(FIND_S)

    async def _why(self, step: Callable[[], Awaitable[None]]) -> str:
        """Do a step. Return why it failed, which the log has once, or nothing."""
        try:
            await step()
        except Exception as error:  # without this task no replica is found any more
            is_ours = not isinstance(error, LoraFsError)
            why = f"the gateway failed: {type(error).__name__}: {error}" if is_ours else str(error)
            if why not in self.problem:
                level, told = (logging.ERROR, error) if is_ours else (logging.WARNING, None)
                logger.log(level, "%s", why, exc_info=told, extra=event("gateway.replicas_unknown"))
            return why
        return ""

    async def _read_token(self) -> None:
        try:
            if self._token is not None:
                async with asyncio.timeout(TOKEN_S):
                    self.headers[HEADER] = await self._threads.run(self._token)
        except TimeoutError as error:
            raise TemporaryError(f"the gateway's token file was not read in {TOKEN_S:g} s") from error

    def _take(self, session: aiohttp.ClientSession, found: Mapping[str, str | None]) -> None:
        for url in [*self.seen]:
            if url not in found:
                if (poll := self._polls.pop(url, None)) is not None:
                    poll.cancel()
                self._out(self.seen[url], "it left", emptied=True)
                del self.seen[url]
        self._unite_names()
        for url, refused in found.items():
            if url in self.seen:
                continue
            self.seen[url] = seen = Seen(url)
            if refused is not None:
                seen.why, seen.is_other = refused, True
                logger.warning("%s", refused, extra=event("gateway.replica_refused", url=url))
                continue
            self._polls[url] = asyncio.create_task(self._poll(session, seen), name=f"poll {url}")

    async def _poll(self, session: aiohttp.ClientSession, seen: Seen) -> None:
        while True:
            asked_at = self._clock()
            try:
                told = await self._ask(session, seen)
                if self.catch_up is not None and self._is_of_this_fleet(seen, told):
                    await self.catch_up(seen.url, told)
                self._learn(seen, told, asked_at)
                seen.missed, self._lacks_files = 0, False
            except aiohttp.ClientConnectorError as error:
                if error.errno in NO_FILES:
                    if not self._lacks_files:
                        logger.warning("replicas are not polled: %s", error, extra=event("gateway.no_files"))
                    self._lacks_files = True
                else:
                    is_named = not isinstance(error, aiohttp.ClientConnectorDNSError)  # else it may run on
                    self._out(seen, f"it takes no connection: {error.strerror or error}", emptied=is_named)
            except (aiohttp.ClientError, TimeoutError) as error:
                seen.missed += 1
                if seen.missed >= MISSED or seen.why:
                    what = str(error) or type(error).__name__
                    self._out(seen, f"it does not answer: {what}")
            except WRONG as error:
                seen.is_other = seen.name is None
                self._out(seen, f"its /metadata is none: {type(error).__name__}: {_text(error)}")
            except Exception as error:  # a fault of ours: without this task the replica stays as it is
                why = f"the gateway failed: {type(error).__name__}: {error}"
                if why != seen.why:
                    logger.exception("replica %s: %s", seen.name, why, extra=event("gateway.poll_failed"))
                self._out(seen, why)
            await asyncio.sleep(max(POLL_S, len(self.seen) / POLLS_PER_S))

    async def _ask(self, session: aiohttp.ClientSession, seen: Seen) -> dict[str, Any]:
        """Return a replica's ``/metadata``. One that does not know the token yet tells what is public."""
        public = {name: value for name, value in self.headers.items() if name != HEADER}
        told = None
        if seen.why and HEADER in self.headers:  # somebody else may have its address by now
            told = await _metadata(session, seen.url, public)
            if not self._is_of_this_fleet(seen, told):
                return told
        try:
            told, is_refused = await _metadata(session, seen.url, self.headers), False
        except TokenRefused:
            told, is_refused = told or await _metadata(session, seen.url, public), True
        if is_refused and not seen.refuses_token:
            about = event("gateway.token_refused", url=seen.url)
            logger.warning("the replica at %s does not know the gateway's token", seen.url, extra=about)
        seen.refuses_token = is_refused
        return told

    def _is_of_this_fleet(self, seen: Seen, told: Mapping[str, Any]) -> bool:
        """Return whether a replica serves the fleet's model, which is its own if no other one is known."""
        model = _text(told["model"]["name"])
        others = (one for one in self.seen.values() if one is not seen)
        if not self._is_given and all(one.model != self._model for one in others):
            self._model = model
        return model == self._model

    def _learn(self, seen: Seen, told: dict[str, Any], asked_at: float) -> None:
        if not told["replica"]:
            raise ValueError("it has no id")
        name, seen.model = _text(told["replica"]), _text(told["model"]["name"])
        seen.answered_at, versions = self._clock(), (told.get("version"), told.get("engine_version"))
        seen.version, seen.engine_version = (None if one is None else _text(one) for one in versions)
        queue = told.get("queue")
        seen.queue = None if queue is None else (_count(queue["running"]), _count(queue["waiting"]))
        seen.is_other = not self._is_of_this_fleet(seen, told)
        if seen.is_other:
            self._out(seen, f"it serves {seen.model}, and this gateway {self._model}")
            return
        holder = self.seen.get(self._holders.get(name, ""), seen)
        if holder is not seen and holder.name == name and not holder.why:
            seen.is_other = True
            self._out(seen, f"it is the replica {name}, which {holder.url} is as well")
            return
        if seen.name not in (None, name):
            self._out(seen, "another replica has its address", emptied=True)
        if holder is not seen:  # it has started anew, at another address
            self._router.lost(name, emptied=True)
        seen.name = name
        self._holders.pop(name, None)
        self._holders[name] = seen.url
        if len(self._holders) > MOST_IDS:
            del self._holders[next(iter(self._holders))]
        if not told["ready"]:
            self._out(seen, "it is not ready")
            return
        loaded: dict[str, dict[str, Any]] = told["lora"]["loaded_loras"]
        slots = told["lora"]["lora_capacity"]
        free = None if slots["available_slots"] is None else _count(slots["available_slots"])
        seen.loaded = _count(slots["loaded_count"])
        seen.capacity = None if free is None else free + seen.loaded
        capacity = None if free is None else free + max(len(loaded), seen.loaded)  # a copy may have two names
        load_s = None if (takes_s := told["lora"].get("load_seconds")) is None else float(takes_s)
        resident = sorted(loaded, key=lambda one: float(loaded[one]["last_used"]))
        digests = {one: str(loaded[one].get("digest", loaded[one]["revision"])) for one in loaded}
        served: list[object] = told["model"].get("served_names", [])
        if not isinstance(served, list):
            raise TypeError("served_names is no list")
        names = frozenset(map(_text, served))
        if seen.why:
            logger.info("replica %s is in", name, extra=event("gateway.replica_in", url=seen.url))
        seen.why, seen.digests = "", digests
        if names and names != seen.base_names:
            seen.base_names = names
            self._unite_names()
        self._router.report(name, resident, capacity, asked_at, load_s)

    def _unite_names(self) -> None:
        self.base_names = frozenset[str]().union(*(seen.base_names for seen in self.seen.values()))

    def _out(self, seen: Seen, why: str, *, emptied: bool = False) -> None:
        if not seen.why:
            told = event("gateway.replica_out", url=seen.url)
            logger.warning("replica %s is out: %s", seen.name, why, extra=told)
        if seen.name is not None and self._holders.get(seen.name) == seen.url:
            self._router.lost(seen.name, emptied=emptied and why != seen.why)
        seen.why = why


async def _metadata(session: aiohttp.ClientSession, url: str, shown: Mapping[str, str]) -> dict[str, Any]:
    """What a replica says of itself. Raises TokenRefused, ClientError, TimeoutError, and as in ``WRONG``."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with session.get(
        f"{url}/metadata", headers=shown, timeout=timeout, allow_redirects=False
    ) as answer:
        if answer.status != 200:
            kind = TokenRefused if answer.status == 401 else ValueError
            raise kind(f"status {answer.status}; is it a sidecar?")
        told = json.loads(await whole(answer, MOST_BYTES))
    if not isinstance(told, dict):
        raise TypeError("it is no object")
    return told


def _count(told: Any) -> int:
    """A replica's word as a count. Raises ValueError: it is over MOST_COUNT; and what ``int`` raises."""
    count = int(told)
    if abs(count) > MOST_COUNT:  # a sum of two may have more digits than JSON's writer takes
        raise ValueError(f"a count is over {MOST_COUNT}")
    return count


def _text(told: object) -> str:
    """A replica's word as encodable text: a string in JSON may be none."""
    return str(told)[:MOST_TEXT].encode(errors="replace").decode()
