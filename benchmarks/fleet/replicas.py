"""A replica on a virtual clock: places that it evicts from, loads one after another, requests that share it.

It behaves as a sidecar with an engine. A load evicts an idle adapter when it is asked for, and waits while
every place is in use. A request takes longer the more are under way.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field


class Clock:
    """Virtual time, in seconds, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` in ``seconds``."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act))

    def run_until(self, end: float) -> None:
        """Let everything happen that happens before ``end``."""
        while self._events and self._events[0][0] < end:
            self.now, _, act = heapq.heappop(self._events)
            act()
        self.now = end


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds that a load takes, a request, and a request more for each that is under way; and the places."""

    load_s: float = 0.5
    request_s: float = 0.5
    each_s: float = 0.05
    places: int = 16


@dataclass(slots=True, eq=False)
class Request:
    """One request. ``done`` is called once with whether it was answered.

    Attributes:
        hit: its adapter was resident when it arrived.
    """

    adapter: str
    asked_at: float
    done: Callable[[Request, bool], None]
    hit: bool = False


@dataclass(slots=True, eq=False)
class Replica:
    """One replica.

    Attributes:
        coldest: chooses what to evict among the idle adapters, the one used longest ago first.
    """

    name: str
    clock: Clock
    pace: Pace
    coldest: Callable[[list[str]], str]
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    under_way: set[Request] = field(default_factory=set)
    loads: int = 0
    served: int = 0
    worst: int = 0
    is_alive: bool = True
    _running: int = 0
    _in_use: Counter[str] = field(default_factory=Counter)
    _waiting: dict[str, list[Request]] = field(default_factory=dict)
    _blocked: deque[str] = field(default_factory=deque)
    _queue: deque[str] = field(default_factory=deque)
    _placed: int = 0

    @property
    def pending(self) -> int:
        """How many loads are asked for and have not ended."""
        return len(self._waiting)

    def holds(self, adapter: str) -> bool:
        """Return whether a request needs no load of its own."""
        return adapter in self.resident or adapter in self._waiting

    def take(self, request: Request) -> None:
        """Take a request."""
        self.under_way.add(request)
        self.worst = max(self.worst, len(self.under_way))
        adapter = request.adapter
        if adapter in self.resident:
            request.hit = True
            self._run(request)
        elif adapter in self._waiting:
            self._waiting[adapter].append(request)
        else:
            self._waiting[adapter] = [request]
            self._blocked.append(adapter)
            self._place()

    def die(self) -> None:
        """Fail what is under way, and answer nothing more."""
        self.is_alive = False
        for request in [*self.under_way]:
            request.done(request, False)
        self.under_way.clear()

    def _place(self) -> None:
        """Give a place to each load that waits for one, as far as there are any."""
        while self._blocked:
            if len(self.resident) + self._placed >= self.pace.places:
                idle = [one for one in self.resident if not self._in_use[one]]
                if not idle:
                    return
                del self.resident[self.coldest(idle)]
            self._placed += 1
            self._queue.append(self._blocked.popleft())
            if len(self._queue) == 1:
                self.clock.after(self.pace.load_s, self._loaded)

    def _loaded(self) -> None:
        if not self.is_alive:
            return
        adapter = self._queue.popleft()
        self._placed -= 1
        self.loads += 1
        self.resident[adapter] = None
        for request in self._waiting.pop(adapter):
            self._run(request)
        if self._queue:
            self.clock.after(self.pace.load_s, self._loaded)

    def _run(self, request: Request) -> None:
        self.resident.move_to_end(request.adapter)
        self._in_use[request.adapter] += 1
        self._running += 1
        took = self.pace.request_s + self._running * self.pace.each_s
        self.clock.after(took, lambda: self._ran(request))

    def _ran(self, request: Request) -> None:
        if not self.is_alive:
            return
        self._running -= 1
        self._in_use[request.adapter] -= 1
        self.served += 1
        self.under_way.discard(request)
        self._place()
        request.done(request, True)
