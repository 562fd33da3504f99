"""Asks the engine, after an adapter's first load, whether it answers as the base model does.

One short request at a time, with a pause after each: nothing waits for it, and it holds up no stream. The
probe keeps an adapter loaded for one such request, and never loads one. It keeps its verdict on bytes by
their digest. A silent engine, an unload or noise means unknown: it asks again, at most MOST_TRIES times
while adapters are in use, and as often while none is.

It asks the base model while no adapter is in use: vLLM before 0.33 on a CPU adds a neighbour's adapter to the
base model's rows of a batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping
from typing import Final, Protocol, runtime_checkable

from lora_fs.sidecar.errors import EngineUnavailable, LoraFsError
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import Record, public_of
from lora_fs.sidecar.reconcile.residents.effect import Effect, Round, Scores, judge
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
        """Log-probabilities of the likeliest next tokens, by an adapter or the base model; None if absent.

        Raises EngineUnavailable: it did not answer, or has no such adapter.
        """


class EffectProbe:
    """The probe of one replica. Calls ``on_verdict`` when it has learnt an adapter's effect."""

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
        self._tries: Counter[tuple[str, bool]] = Counter()  # of bytes, beside other adapters or not
        self._is_mute = False  # the engine gives no log-probabilities
        self._due = asyncio.Event()

    def look(self) -> None:
        """Begin with the new adapters. Call it on the event loop after each pass."""
        self._due.set()

    def keep_only(self, known: Container[str]) -> None:
        """Forget what is known of bytes that no adapter has any more. ``known``: digests."""
        effects = self._residents.effects
        for digest in [one for one in effects if one not in known]:
            del effects[digest]
        for one in [one for one in self._tries if one[0] not in known]:
            del self._tries[one]

    async def run(self) -> None:
        """Judge the loaded adapters, one at a time, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            try:
                base = await self._learn_base()
            except LoraFsError as error:
                logger.debug("no adapter is judged: %s", error, extra=event("effect.unknown"))
            else:
                for name, record in list(self._waiting()):
                    await self._judge(name, record, base)
            if self._lacks_base or any(True for _ in self._waiting()):
                await asyncio.sleep(self._retry_s)
                self._due.set()

    @property
    def _lacks_base(self) -> bool:
        return not self._is_mute and len(self._residents.base_scores) < len(PROMPTS)

    async def _learn_base(self) -> Mapping[str, Scores]:
        """Return the base model's own scores for each prompt; ask the engine for missing ones.

        Raises:
            EngineUnavailable: adapters are in use, two answers differ, or the engine became another one.
        """
        residents = self._residents
        for prompt in PROMPTS:
            if self._is_mute or prompt in residents.base_scores:
                continue
            answers = list[Scores]()
            for _ in range(2):
                scores = await self._ask(None, prompt) if residents.is_idle else ()
                if scores is None:
                    self._is_mute = True
                    return {}
                if not (scores and residents.is_idle) or (answers and answers[0] != scores):
                    raise EngineUnavailable("adapters are in use, and the base model has to be asked alone")
                answers.append(scores)
                await asyncio.sleep(self._pause_s)
            residents.base_scores[prompt] = answers[0]
        if self._lacks_base:  # a pass forgot them
            raise EngineUnavailable("it is another engine than before")
        return dict(residents.base_scores)

    def _waiting(self) -> Iterator[tuple[str, Record]]:
        residents = self._residents
        for name, record in residents.records.items() if not self._is_mute else ():
            digest = record.spec.digest
            is_unknown = digest not in residents.effects
            is_due = is_unknown and self._tries[digest, residents.is_idle] < MOST_TRIES
            if is_due and name in residents.paths and not residents.may_reread(name):
                yield name, record

    async def _judge(self, name: str, record: Record, base: Mapping[str, Scores]) -> None:
        digest, rounds, found = record.spec.digest, list[Round](), Effect.UNKNOWN
        self._tries[digest, self._residents.is_idle] += 1
        try:
            for prompt in PROMPTS:
                asked = await self._asked(name, prompt)
                if asked is None:
                    for is_idle in (True, False):
                        self._tries[digest, is_idle] = MOST_TRIES
                    return
                rounds.append(Round(base[prompt], asked))
                found = judge(rounds)
                if found is Effect.SOME:
                    break
        except LoraFsError as error:
            logger.debug("%s is not judged: %s", name, error, extra=event("effect.unknown", adapter=name))
            return
        if found is Effect.UNKNOWN:
            return
        for is_idle in (True, False):
            del self._tries[digest, is_idle]
        self._residents.effects[digest] = found
        if found is Effect.NONE:
            told = event("effect.none", adapter=public_of(name), revision=record.revision)
            logger.warning("%s answers as the base model does", public_of(name), extra=told)
            self._events.tell("NoEffect", NO_EFFECT, record.key, warning=True)
        self._on_verdict()

    async def _asked(self, name: str, prompt: str) -> tuple[Scores, Scores] | None:
        answers = []
        for _ in range(2):
            with self._residents.lent(name) as lent:
                if not lent:
                    raise EngineUnavailable(f"{public_of(name)} is being unloaded")
                scores = await self._ask(name, prompt)
            if scores is None:
                return None
            answers.append(scores)
            await asyncio.sleep(self._pause_s)
        return answers[0], answers[1]


NO_EFFECT: Final = (
    f"it answers {len(PROMPTS)} prompts with the base model's own probabilities: its B may be zero, or its "
    "names match no layer of this model; compare its tensors' names with the base model's"
)
