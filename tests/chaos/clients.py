"""Clients that check every answer: right at that moment, not there at that moment, refused, or wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field

import openai

from lora_fs.demo.replica import PROMPT, openai_client
from tests.chaos.faults import Faults
from tests.chaos.fleet import Fleet, ask
from tests.chaos.truth import ABSENT, Truth


@dataclass
class Seen:
    """What all clients saw. Lists hold what somebody has to read."""

    right: Counter[str] = field(default_factory=Counter)  # by where it was asked
    absent: Counter[str] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)  # failed meanwhile, by the fault
    failed: list[str] = field(default_factory=list)  # with no fault to blame
    wrong: list[str] = field(default_factory=list)
    oldest_s: float = 0.0  # an answer was right until so long before it was asked for


class Client:
    """One thread that asks for names at random, by the gateway or at a replica."""

    def __init__(
        self, fleet: Fleet, truth: Truth, faults: Faults, names: Sequence[str], seen: Seen, seed: int
    ) -> None:
        self.fleet, self.truth, self.faults, self.names, self.seen = fleet, truth, faults, names, seen
        self.rng = random.Random(seed)

    def run(self, ended: threading.Event, think_s: float) -> None:
        """Ask until then."""
        clients = {where: openai_client(url, timeout=60) for where, url in self.fleet.urls.items()}
        where_to = ["gateway", "gateway", *sorted(clients)]
        while not ended.wait(self.rng.uniform(0, 2 * think_s)):
            where = self.rng.choice(where_to)
            self.ask(clients[where], where, self.rng.choice(self.names))
        for client in clients.values():
            with closing(client):
                pass

    def ask(self, client: openai.OpenAI, where: str, name: str) -> None:
        """One request, and the verdict on its answer."""
        since = time.monotonic()
        try:
            text: str = ask(client, name, PROMPT)
            answer = self.fleet.label_of(text) or f"unknown weights: {text!r}"
        except openai.NotFoundError:
            answer = ABSENT
        except openai.OpenAIError as error:
            self._failed(where, name, since, _told(error))
            return
        may = self.truth.could_be(name, since, time.monotonic())
        if answer not in may:
            told = f"{since:.2f} {where} {name}: {answer}, and not {sorted(may)}"
            self.seen.wrong.append(f"{told}; meanwhile: {self.faults.during(since, time.monotonic())}")
            return
        self.seen.oldest_s = max(self.seen.oldest_s, self.truth.age_s(name, answer, since))
        (self.seen.absent if answer == ABSENT else self.seen.right)[where] += 1

    def _failed(self, where: str, name: str, since: float, why: str) -> None:
        until = time.monotonic()
        fault = self.faults.during(since, until)
        may = self.truth.could_be(name, since, until)
        if fault is None and "digest-mismatch" in why and len(may) > 1:
            fault = "the files of its dropped folder change"  # the old ones are nowhere any more
        if fault is None and "its folder is gone from the volume" in why and may > {ABSENT}:
            fault = "its dropped folder is taken away"  # and the volume does not say so yet
        if fault is not None:
            self.seen.disturbed[fault] += 1
        else:
            self.seen.failed.append(f"{since:.2f} to {until:.2f} {where} {name}: {why}")


def _told(error: BaseException) -> str:
    """An error and what caused it: the client's own says "Connection error." of all that may befall one."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    return ", of ".join(f"{type(one).__name__}: {one}" for one in causes)
