"""A canary that advances by itself: a share, a time under watch, a gate, the next share; else back.

Whatever ends it before its last step, a failure, an error or Ctrl-C, ends the trial: the revision that
serves the name answers everything again. A killed process leaves the share as it is. A trial that somebody
else ended, changed or began stays as it is, and the command ends with Conflict.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import click

from lora_fs.sidecar.cli.exit_codes import INVALID
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import complain
from lora_fs.sidecar.errors import Conflict, LoraFsError, NotFound, TemporaryError
from lora_fs.sidecar.model import AdapterKey, Canary, Phase, Pointer, ReplicaStatus, RevisionUsage, Scope
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.model.gates import Gate
from lora_fs.sidecar.registry.lifecycle.acts import Try
from lora_fs.sidecar.registry.view.reports import LIVE_S, age_s

LOOK_S = 1.0
REPORT_S = 10.0  # how old a replica's counts may be: ``status_file.HEARTBEAT_S``


class Steps(click.ParamType[tuple[int, ...]]):
    """``5,25,100``: rising percentages."""

    name = "steps"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        parts = str(value).split(",")
        if not all(part.strip().isascii() and part.strip().isdigit() and len(part) < 5 for part in parts):
            self.fail(f"{value!r} are no steps: write rising percentages, such as 5,25,100", param, ctx)
        steps = tuple(int(part) for part in parts)
        if steps[0] < 1 or steps[-1] > 100 or list(steps) != sorted(set(steps)):
            self.fail(f"{value!r} do not rise from 1 to 100: write such as 5,25,100", param, ctx)
        return steps


@dataclass(slots=True)
class Live:
    """Requests and errors of one revision, of each replica since its first report; restarts begin at 0."""

    key: AdapterKey
    before: dict[str, RevisionUsage] = field(default_factory=dict)

    def begin(self, replicas: Iterable[ReplicaStatus]) -> None:
        """Count those replicas from now on that are not counted yet."""
        for one in replicas:
            self.before.setdefault(one.replica, one.usage.get(str(self.key), RevisionUsage()))

    def figures(self, replicas: Iterable[ReplicaStatus]) -> dict[str, float]:
        """By the names that gates have for them; no rate of no requests."""
        requests = errors = 0
        for one in replicas:
            now, before = one.usage.get(str(self.key), RevisionUsage()), self.before[one.replica]
            if before.requests > now.requests:
                before = RevisionUsage()
            requests += now.requests - before.requests
            errors += now.errors_4xx + now.errors_5xx - before.errors_4xx - before.errors_5xx
        rate = {"live_error_rate": max(0, errors) / requests} if requests else {}
        return {"live_requests": requests, "live_errors": max(0, errors), **rate}


def problems(replicas: Iterable[ReplicaStatus], key: AdapterKey) -> list[str]:
    """Why a revision must not answer more requests: a replica cannot load it, or it changes nothing."""
    return [
        f"{status.replica}: {one.reason}: {one.message}"
        for status in replicas
        for one in status.adapters.values()
        if AdapterKey(*one.key) == key and (one.phase is Phase.FAILED or one.reason == "NoEffect")
    ]


class Stepping:
    """The steps of one trial. ``evaluation``: of the canary's revision; None: there is none."""

    def __init__(
        self,
        context: Context,
        scope: Scope,
        key: AdapterKey,
        gate: Gate | None,
        evaluation: Evaluation | None,
    ) -> None:
        self._context, self._scope, self._key, self._gate = context, scope, key, gate
        self._evaluation = evaluation
        self._trial: Canary | None = None  # as the last step left it

    def run(self, steps: Sequence[int], every_s: float, *, force: bool) -> Pointer:
        """Take each step, and after the last one of 100 % let the revision serve the name.

        Raises:
            click.exceptions.Exit: with INVALID, after a failed step ended the trial.
            Conflict: another revision is on trial, or somebody changed this trial.
        """
        pointer = self._context.backend.named(self._scope, self._key.name).pointer
        if pointer is None or pointer.revision is None:
            raise NotFound(f"{self._key.name} serves nothing in {self._scope}: promote a revision first")
        baseline = AdapterKey(*self._scope, pointer.revision, self._key.name)
        if every_s < REPORT_S and self._gate is not None and self._gate.needs_live:
            complain(
                f"the gate asks for users' requests, which replicas report every {REPORT_S:g} s: a step of "
                f"{every_s:g} s may see none of its own; give --every more than {REPORT_S:g}s"
            )
        try:
            for share in steps:
                pointer = self._do(Try(revision=self._key.revision, percent=share, force=force))
                self._trial = pointer.canary
                self._context.say(f"{self._key.name}@{self._key.revision} answers {share} % of the requests")
                if failed := self._watched(baseline, every_s):
                    complain(
                        "\n".join((f"{share} % failed: {baseline.revision} answers everything", *failed))
                    )
                    raise click.exceptions.Exit(INVALID)
        except Conflict:
            raise  # it is somebody else's
        except BaseException:
            self._go_back()
            raise
        if steps[-1] == 100:
            pointer = self._do(Try(end="finish", force=force))
        return pointer

    def _watched(self, baseline: AdapterKey, every_s: float) -> list[str]:
        """Watch the replicas for ``every_s``; return why the trial must end, if it must."""
        tried, serving, deadline = Live(self._key), Live(baseline), time.monotonic() + every_s
        while True:
            replicas = self._replicas(deadline)
            tried.begin(replicas)
            serving.begin(replicas)
            if failed := problems(replicas, self._key):
                return failed
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            time.sleep(min(LOOK_S, remaining))
        if not replicas:
            complain(
                "no live replica reports: no failure to load ends the trial; see `lora-fs status`, and this "
                "machine's clock"
            )
        if self._gate is None:
            return []
        found = self._evaluation
        known, before = (found.figures, found.baseline_figures) if found is not None else ({}, {})
        figures = {**known, **tried.figures(replicas)}
        return list(self._gate.unmet(figures, {**before, **serving.figures(replicas)}))

    def _replicas(self, deadline: float) -> list[ReplicaStatus]:
        """The live replicas. Asks a volume that does not answer again until the deadline.

        Raises:
            Conflict: somebody changed the trial.
        """
        while True:
            try:
                if self._canary() != self._trial:
                    raise Conflict(
                        f"somebody else ended or changed the trial of {self._key.name}: it stays as it is now"
                    )
                reports = self._context.backend.reports()
                return [status for status in reports.of(self._scope) if age_s(status) < LIVE_S]
            except TemporaryError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK_S)

    def _do(self, act: Try) -> Pointer:
        pointer = self._context.backend.do(self._scope, self._key.name, act).pointer
        assert pointer is not None  # the act moves it
        return pointer

    def _canary(self) -> Canary | None:
        pointer = self._context.backend.named(self._scope, self._key.name).pointer
        return pointer.canary if pointer is not None else None

    def _go_back(self) -> None:
        try:
            on_trial = self._canary()
            if on_trial is not None and on_trial.revision == self._key.revision:
                self._do(Try(end="abort"))
        except LoraFsError as error:
            complain(f"the trial could not be ended: {error}: lora-fs canary {self._key.name} --abort")
