"""Asks the engine, after an adapter's first load, whether it answers as the base model does.

One short request at a time, with a pause after each: nothing waits for it, and no stream is held up. An
adapter is kept loaded for one such request, and never loaded for it. What is known of bytes is kept by their
digest. A silent engine, an unload or noise means unknown: it is asked again, at most MOST_TRIES times, and
what was answered before counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Protocol, runtime_checkable

from lora_fs.sidecar.errors import EngineUnavailable, LoraFsError
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Record, public_of
from lora_fs.sidecar.reconcile.residents.effect import Effect, Round, judge
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.telemetry.events import EventLog

logger = logging.getLogger(__name__)

PROMPTS: Final = (
    "Dear customer, thank you for",
    "SELECT name, count(*) FROM",
    "def main(arguments): return",
)
PAUSE_S: Final = 0.05
RETRY_S: Final = 2.0
MOST_TRIES: Final = 20

Ask = Callable[[str | None, str], Awaitable[tuple[float, ...] | None]]


@runtime_checkable
class GivesLogprobs(Protocol):
    """An engine that gives log-probabilities."""

    async def next_logprobs(self, name: str | None, prompt: str) -> tuple[float, ...] | None:
        """Those of the likeliest next tokens, of an adapter or the base model; None if it gives none.

        Raises EngineUnavailable: it did not answer, or has no such adapter.
        """


class EffectProbe:
    """Of one replica. ``on_verdict`` is called when an adapter is found to have no effect."""

    def __init__(
        self,
        ask: Ask,
        residents: Residents,
        events: EventLog,
        on_verdict: Callable[[], None],
        *,
        pause_s: float = PAUSE_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._ask, self._residents, self._events, self._on_verdict = ask, residents, events, on_verdict
        self._pause_s, self._retry_s = pause_s, retry_s
        self._tries: Counter[str] = Counter()
        self._rounds: defaultdict[str, list[Round]] = defaultdict(list)  # of what is not known yet, by digest
        self._due = asyncio.Event()

    def look(self) -> None:
        """Begin with what was loaded since; call it on the event loop after each pass."""
        if any(True for _ in self._waiting()):
            self._due.set()

    async def run(self) -> None:
        """Judge what is loaded, one adapter at a time, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            for name, record in list(self._waiting()):
                await self._judge(name, record)
            if any(True for _ in self._waiting()):
                await asyncio.sleep(self._retry_s)
                self._due.set()

    def _waiting(self) -> Iterator[tuple[str, Record]]:
        residents = self._residents
        for name, record in residents.records.items():
            digest = record.spec.digest
            unknown = digest not in residents.effects and self._tries[digest] < MOST_TRIES
            if unknown and name in residents.paths and not residents.may_reread(name):
                yield name, record

    async def _judge(self, name: str, record: Record) -> None:
        digest, found = record.spec.digest, Effect.UNKNOWN
        rounds = self._rounds[digest]
        self._tries[digest] += 1
        try:
            for prompt in PROMPTS:
                asked = await self._round(name, prompt)
                if asked is None:
                    self._tries[digest] = MOST_TRIES
                    return
                rounds.append(asked)
                found = judge(rounds)
                if found is Effect.SOME:
                    break
        except LoraFsError as error:
            logger.debug("%s is not judged: %s", name, error, extra=event("effect.unknown", adapter=name))
            return
        if found is Effect.UNKNOWN:
            return
        del self._tries[digest], self._rounds[digest]
        self._residents.effects[digest] = found
        if found is Effect.NONE:
            self._tell(name, record)

    async def _round(self, name: str, prompt: str) -> Round | None:
        answers = []
        for model in (None, name, None, name):
            with self._residents.lent(name) as lent:
                if not lent:
                    raise EngineUnavailable(f"{public_of(name)} is being unloaded")
                scores = await self._ask(model, prompt)
            if scores is None:
                return None
            answers.append(scores)
            await asyncio.sleep(self._pause_s)
        return Round((answers[0], answers[2]), (answers[1], answers[3]))

    def _tell(self, name: str, record: Record) -> None:
        told = event("effect.none", adapter=public_of(name), revision=record.revision)
        logger.warning("%s answers as the base model does", public_of(name), extra=told)
        self._events.tell("NoEffect", NO_EFFECT, record.key, warning=True)
        self._on_verdict()


NO_EFFECT: Final = (
    f"it answers {len(PROMPTS)} prompts with the base model's own probabilities, but for the engine's noise: "
    "its B may be zero, or its names match no layer of this model; compare its tensors' names with the base "
    "model's"
)
