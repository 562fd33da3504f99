"""What goes wrong at random: processes that die or stand still, the volume gone or full.

Owns which time counts as disturbed: from a fault's begin until the fleet is whole again, that is ready at the
gateway. In that time a request may fail; it may never be answered wrong.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set

import httpx

from lora_fs.demo.process import LOCAL
from lora_fs.demo.waiting import NeverHappened, wait_until
from lora_fs.sidecar.registry.format.layout import LEASES
from tests.chaos.fleet import Fleet

WHOLE_S = 120.0
UNFINISHED = "Unfinished: who registers copied it"


class Faults:
    """One thread of them. ``done``: how many of each. ``disturbed``: (from, until) of each.

    Args:
        broken_off: names of which a registration failed or was killed, as they come.
    """

    def __init__(
        self, fleet: Fleet, seed: int, every_s: tuple[float, float], broken_off: Set[str] = frozenset()
    ) -> None:
        self.broken_off = broken_off
        self.fleet, self.rng, self.every_s = fleet, random.Random(seed), every_s
        self.done = Counter[str]()
        self.disturbed: list[tuple[float, float, str]] = []
        self._now: tuple[float, str] | None = None
        self.resting, self.rests = threading.Event(), threading.Event()
        self.kinds: dict[str, Callable[[], None]] = {
            "kill the sidecar": self._kill_sidecar,
            "kill the stock engine": self._kill_engine,
            "kill the plugin's engine": self._kill_plugin,
            "the sidecar stands still": self._pause,
            "the volume is gone": self._lose_volume,
            "the volume is full": self._fill_volume,
        }

    def run(self, ended: threading.Event) -> None:
        """One after the other, each kind as often."""
        left: list[str] = []
        while not ended.wait(0 if self.resting.is_set() else self.rng.uniform(*self.every_s)):
            if self.resting.is_set():
                self.rests.set()
                ended.wait(0.1)
                continue
            self.rests.clear()
            left = left or self.rng.sample(sorted(self.kinds), len(self.kinds))
            what = left.pop()
            began = time.monotonic()
            self._now = began, what
            self.kinds[what]()
            try:
                wait_until(f"the fleet is whole after: {what}", self.is_whole, timeout_s=WHOLE_S)
            except NeverHappened as error:
                error.add_note(str([one.http.get("/readyz").text for one in self.fleet.replicas]))
                raise
            self.disturbed.append((began, time.monotonic(), what))
            self._now = None
            self.done[what] += 1

    def during(self, since: float, until: float) -> str | None:
        """Which fault a request of that time met, if any."""
        now = self._now
        spans = [*self.disturbed, *([(now[0], until, now[1])] if now else [])]
        return next((what for began, ended, what in spans if began <= until and since <= ended), None)

    def is_whole(self) -> bool:
        """Both engines answer, both replicas are ready and report no fault, and the gateway sends to both.

        A replica may not have met the fault yet: what it says is not enough.
        """
        try:
            for replica in self.fleet.replicas:
                if httpx.get(f"{replica.engine_url}/health", **LOCAL | {"timeout": 5}).status_code != 200:
                    return False
                told = httpx.get(f"{replica.url}/readyz", **LOCAL | {"timeout": 5})
                if told.status_code != 200 or not all(map(self._is_a_copy_left, told.json()["conditions"])):
                    return False
            told = httpx.get(f"{self.fleet.gateway.url}/health", **LOCAL | {"timeout": 5})
            return len(told.json()["ready"]) == len(self.fleet.replicas)
        except httpx.HTTPError:
            return False

    def _is_a_copy_left(self, condition: str) -> bool:
        """Whether a registration left its copy, which no fault's end mends: gc removes it in a day."""
        key, is_one, _ = condition.removeprefix("NotAdopted: ").partition(f": {UNFINISHED}")
        return bool(is_one) and key.rpartition("/")[2] in self.broken_off

    def _kill_sidecar(self) -> None:
        self.fleet.sidecar.sidecar.kill()
        self.fleet.sidecar.start_sidecar()

    def _kill_engine(self) -> None:
        self.fleet.sidecar.engine.kill()
        self.fleet.sidecar.start_engine()

    def _kill_plugin(self) -> None:
        self.fleet.plugin.engine.kill()
        self.fleet.plugin.start()

    def _pause(self) -> None:
        with self.fleet.sidecar.sidecar.paused():
            time.sleep(self.rng.uniform(0.5, 4))

    def _lose_volume(self) -> None:
        """An empty folder where it was, as when a mount is lost."""
        with _away(self.fleet):
            time.sleep(self.rng.uniform(0.5, 5))

    def _fill_volume(self) -> None:
        filler = self.fleet.volume.root.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"\0" * 65536)
                file.flush()
        try:
            time.sleep(self.rng.uniform(0.5, 5))
        finally:
            filler.unlink()


@contextlib.contextmanager
def _away(fleet: Fleet) -> Iterator[None]:
    root = fleet.volume.root
    away, empty = root.with_name("away"), root.with_name("empty")
    root.rename(away)
    root.mkdir()
    try:
        yield
    finally:
        root.rename(empty)
        away.rename(root)
        made = [one.name for one in empty.iterdir() if one.name != LEASES]  # which filelock makes
        shutil.rmtree(empty)
        assert not made, f"made in an empty mount point: {made}"
