"""A day of chaos: changes, faults and clients at once, with a rest now and then, and its report.

Owns the threads and the rests. In a rest nothing changes and nothing fails: then every replica must list what
the volume lists, and answer each name as the last acknowledgement says.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT, openai_client
from lora_fs.demo.tiny_llama import MODEL_NAME
from tests.chaos.changes import Changer, Dropper, Operator, read
from tests.chaos.clients import Client, Seen
from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet, ask
from tests.chaos.truth import ABSENT, Truth

NAMES = tuple(f"name-{number}" for number in range(8))
DROPPED = ("dropped-0", "dropped-1")
CLIENTS, THINK_S = 4, 0.3
GRACE_S = 10.0  # after an acknowledgement; how old the oldest answer was is reported
EQUAL_S = 30.0  # a list that is not equal then never will be


class Resting(Protocol):
    """A thread that rests between two acts when it is asked to, and says so."""

    resting: threading.Event
    rests: threading.Event

    def run(self, ended: threading.Event) -> None:
        """Act until then."""


@dataclass
class Report:
    """``equal_s``: where, by rest, after how many seconds it listed what the volume does."""

    seconds: float
    changes: dict[str, int] = field(default_factory=dict)
    changes_that_failed: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    equal_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    lost: list[str] = field(default_factory=list)
    disturbed: list[tuple[float, float, str]] = field(default_factory=list)

    def __str__(self) -> str:
        told: dict[str, Any] = {
            "seconds": round(self.seconds),
            "changes acknowledged": self.changes,
            "changes that failed": self.changes_that_failed,
            "faults": self.faults,
            "answers right": dict(self.seen.right),
            "right that it is not there": dict(self.seen.absent),
            "requests failed during a fault": dict(self.seen.disturbed),
            "requests failed otherwise": self.seen.failed[:20],
            "wrong answers": self.seen.wrong,
            "oldest answer, s after the acknowledgement": round(self.seen.oldest_s, 2),
            "lists equal after, s": self.equal_s,
            "acknowledgements lost": self.lost,
        }
        return json.dumps(told, indent=1)


def spend(
    fleet: Fleet, seconds: float, *, seed: int, rest_every_s: float, faults_every_s: tuple[float, float]
) -> Report:
    """Run it for so long.

    Args:
        seed: of all choices; the timing is the machine's.
        rest_every_s: between the ends of two rests.
        faults_every_s: at least and at most, between two faults.
    """
    truth = Truth(GRACE_S)
    changers: list[Changer] = [Operator(fleet, truth, NAMES, seed), Dropper(fleet, truth, DROPPED, seed + 1)]
    faults, seen = Faults(fleet, seed + 2, faults_every_s, changers[0].broken_off), Seen()
    clients = [
        Client(fleet, truth, faults, (*NAMES, *DROPPED), seen, seed + 10 + number)
        for number in range(CLIENTS)
    ]
    busy: list[Resting] = [*changers, faults]
    report, ended, died = Report(seconds, seen=seen), threading.Event(), list[BaseException]()

    def guarded(run: Callable[..., None], *arguments: float) -> None:
        try:
            run(ended, *arguments)
        except BaseException as error:
            died.append(error)
            ended.set()

    threads = [threading.Thread(target=guarded, args=(one.run,)) for one in busy]
    threads += [threading.Thread(target=guarded, args=(one.run, THINK_S)) for one in clients]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        while not ended.is_set() and time.monotonic() - began < seconds:
            ended.wait(min(rest_every_s, max(0.0, began + seconds - time.monotonic())))
            _rest(fleet, truth, busy, ended, report)
    finally:
        ended.set()
        for thread in threads:
            thread.join(120)
    if died:
        raise died[0]
    report.seconds = time.monotonic() - began
    for changer in changers:
        report.changes.update(changer.done)
        report.changes_that_failed.update(changer.failed)
    report.faults.update(faults.done)
    report.disturbed = faults.disturbed
    return report


def _rest(
    fleet: Fleet,
    truth: Truth,
    busy: Sequence[Resting],
    ended: threading.Event,
    report: Report,
) -> None:
    """Stop changes and faults, compare, and let them go on."""
    for one in busy:
        one.rests.clear()
        one.resting.set()
    for one in busy:
        while not one.rests.wait(1) and not ended.is_set():
            pass
    if ended.is_set():
        return
    with _watched(fleet) as lists:
        began = time.monotonic()
        states = {name: read(fleet, name) for name in (*NAMES, *DROPPED)}
        listed = {name for name, state in states.items() if state is not None and state.active is not None}
        while time.monotonic() - began < EQUAL_S and any(told[-1][1] != listed for told in lists.values()):
            time.sleep(0.05)
    for where, told in lists.items():
        if told[-1][1] != listed:
            report.lost.append(f"the volume lists {sorted(listed)}, {where} {sorted(told[-1][1])}")
        others = [at for at, names in told if names != listed]
        report.equal_s[where].append(round(max(0.0, max(others, default=began) - began), 2))
    now = time.monotonic() + GRACE_S
    for name, state in states.items():
        on_disk = state.said_by(state.active) or {ABSENT} if state is not None else set()
        if not on_disk & (may := truth.could_be(name, now, now)):
            report.lost.append(f"{name}: {on_disk} on the volume, and not {sorted(may)}")
    for where, url in fleet.urls.items():
        with openai_client(url, timeout=60) as client:
            for name in sorted(listed):
                label = fleet.label_of(ask(client, name, PROMPT))
                if label not in (may := truth.could_be(name, now, now)):
                    report.lost.append(f"{name}: {where} answers {label}, and not {sorted(may)}")
    for one in busy:
        one.resting.clear()


@contextmanager
def _watched(fleet: Fleet) -> Iterator[dict[str, list[tuple[float, set[str]]]]]:
    """What everybody lists meanwhile, and when: at least once before, and again and again."""
    lists: dict[str, list[tuple[float, set[str]]]] = {where: [] for where in fleet.urls}
    ended = threading.Event()

    def look() -> None:
        while True:
            for where, url in fleet.urls.items():
                names = _names(url)
                lists[where].append((time.monotonic(), names))
            if ended.wait(0.05):
                return

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        try:
            while not all(lists.values()) and not looking.done():
                time.sleep(0.01)
            yield lists
        finally:
            ended.set()
        looking.result()


def _names(url: str) -> set[str]:
    told = httpx.get(f"{url}/v1/models", **LOCAL | {"timeout": 30})
    return {card["id"] for card in told.json()["data"]} - {MODEL_NAME}
