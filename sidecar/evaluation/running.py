"""One evaluation: every case asked of each revision, so many at a time, scored and counted.

The revisions take turns at each case, and at who is first: both meet the same load. If a replica is away, the
run waits and asks again: only a replica's answer counts for or against a revision.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

from lora_fs.sidecar.evaluation.asking import Answer, Refused, ReplicaAway
from lora_fs.sidecar.evaluation.cases import Case, Data
from lora_fs.sidecar.evaluation.comparison import Pairs, Result, Totals
from lora_fs.sidecar.evaluation.journal import Journal
from lora_fs.sidecar.evaluation.patience import PAUSE_S, Patience
from lora_fs.sidecar.model.evaluation import Flip

MOST_FLIPS: Final = 100

Score = Callable[[Case, Answer], Awaitable[float]]


class Asks(Protocol):
    """Who answers; see ``asking.Asker``."""

    async def ask(self, model: str, case: Case) -> Answer:
        """Ask for one answer; raises ReplicaAway and Refused."""


@dataclass(slots=True)
class Found:
    """The results so far. The first of ``totals`` is that of the evaluated revision."""

    totals: tuple[Totals, ...]
    pairs: Pairs = field(default_factory=Pairs)
    flips: list[Flip] = field(default_factory=list)
    passed_by_none: int = 0
    waited_s: float = 0.0
    last_error: str = ""

    def add(self, line: int, case_id: str, results: tuple[Result, ...]) -> None:
        for totals, result in zip(self.totals, results, strict=True):
            totals.add(result)
        self.passed_by_none += not any(one.passed for one in results)
        if len(results) == 1:
            return
        result, baseline = results
        self.pairs.add(result, baseline)
        if result.passed != baseline.passed and len(self.flips) < MOST_FLIPS:
            self.flips.append(Flip(line=line, id=case_id, regression=baseline.passed))


async def by_expectation(case: Case, answer: Answer) -> float:
    """Score 1 if the answer is what the case expects, else 0."""
    assert case.expect is not None  # ``cases`` refuses one that expects nothing and has no command
    if case.expect.choices is not None:
        return float(case.expect.chosen(answer.likely))
    return float(case.expect.met(answer.text))


class Evaluating:
    """One evaluation under way.

    Args:
        models: the names to ask for: the revision, and the one to compare it with if there is one.
        patience_s: how long a replica may be away. journal: None: nobody can resume the run.
    """

    def __init__(
        self,
        asker: Asks,
        models: tuple[str, ...],
        *,
        concurrency: int,
        patience_s: float,
        journal: Journal | None = None,
        score: Score = by_expectation,
        progress: Callable[[int], None] = lambda count: None,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._asker, self._models, self._score = asker, models, score
        self._concurrency, self._patience_s, self._pause_s = concurrency, patience_s, pause_s
        self._journal, self._progress = journal, progress

    async def run(self, data: Data) -> Found:
        """Ask every case.

        Raises:
            ReplicaAway: for longer than ``patience_s``. InputError: the data changed.
        """
        found, known = Found(tuple(Totals() for _ in self._models)), bytearray()  # a byte a line
        for line, case_id, results in self._journal.known() if self._journal is not None else ():
            known.extend(bytes(max(0, line + 1 - len(known))))
            known[line] = 1
            found.add(line, case_id, results)
            self._progress(1)
        cases = ((line, case) for line, case in data if line >= len(known) or not known[line])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._concurrency):
                    group.create_task(self._work(cases, found))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return found

    async def _work(self, cases: Iterator[tuple[int, Case]], found: Found) -> None:
        for line, case in cases:
            order = range(len(self._models))
            by_model: dict[int, Result] = {}
            for index in order if line % 2 else reversed(order):
                by_model[index] = await self._result(self._models[index], case, found)
            results = tuple(by_model[index] for index in order)
            if self._journal is not None:
                self._journal.add(line, case.id, results)
            found.add(line, case.id, results)
            self._progress(1)

    async def _result(self, model: str, case: Case, found: Found) -> Result:
        patience = Patience(self._patience_s, self._pause_s)
        while True:
            try:
                answer = await self._asker.ask(model, case)
                score = await self._score(case, answer)
                return Result(score, ttft_ms=answer.ttft_ms, tokens_per_s=answer.tokens_per_s)
            except Refused as error:
                if not patience.doubts(error.status):
                    found.last_error = f"{model}: {error}"
                    return Result(0.0, error=True)
            except ReplicaAway:
                if patience.is_used_up():
                    raise
            found.waited_s += await patience.pause()
