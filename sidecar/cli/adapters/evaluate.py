"""evaluate: the same cases asked of a revision and of the one before it, compared, and held to a gate."""

from __future__ import annotations

import asyncio
import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lora_fs.sidecar.cli.exit_codes import INVALID
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration, Place
from lora_fs.sidecar.cli.output import Format, complain
from lora_fs.sidecar.errors import NotFound, OperatorError
from lora_fs.sidecar.setting_checks import server_address
from lora_fs.sidecar.sources.uri import redacted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lora_fs.sidecar.cli.backends.port import Named
    from lora_fs.sidecar.evaluation.cases import Data
    from lora_fs.sidecar.evaluation.journal import Journal
    from lora_fs.sidecar.evaluation.running import Found, Score
    from lora_fs.sidecar.model import Record
    from lora_fs.sidecar.model.evaluation import Evaluation

CONFIDENCE = 0.95


def _address(_: object, __: object, url: str | None) -> str | None:
    """Refuse what nobody could ask, before anybody waits for an answer."""
    try:
        return server_address(url)
    except ValueError as error:
        raise click.UsageError(
            f"--url {redacted(str(url))} is no address: write for example http://gateway:8001, "
            "and a key into --api-key-file"
        ) from error


@command()
@parameters.name
@parameters.other_revision
@click.option("--data", type=Place(), required=True, metavar="FILE", help="The cases: JSONL, one a line")
@click.option(
    "--against",
    metavar="R",
    callback=parameters.segment("revision"),
    help="The revision to compare with [default: the one that NAME serves; none if that is REVISION]",
)
@click.option(
    "--url",
    metavar="URL",
    callback=_address,
    help="The replica or gateway to ask [default: the sidecar that --server names]",
)
@click.option("--gate", metavar="GATE", help="Exit 5 if it is not passed, such as 'pass_rate>=0.9'")
@click.option(
    "--concurrency",
    type=click.IntRange(1, 1024),
    default=4,
    show_default=True,
    metavar="N",
    help="Answers under way at a time",
)
@click.option(
    "--patience",
    type=Duration(),
    default="5m",
    show_default=True,
    help="How long a replica may be away before the evaluation gives up",
)
@click.option("--journal", type=Place(), metavar="FILE", help="Keep each result; a later run goes on from it")
@click.option("--score-command", metavar="CMD", help="Score answers by a command, from 0 to 1")
@click.option("--api-key-file", type=Place(), metavar="FILE", help="The key that URL asks for")
@click.option("--dry-run", is_flag=True, help="Ask and compare all the same, and keep no result")
@parameters.no_headers
@parameters.output
@click.pass_obj
def evaluate(
    context: Context,
    name: str,
    revision: str | None,
    data: Path,
    against: str | None,
    url: str | None,
    gate: str | None,
    concurrency: int,
    patience: float,
    journal: Path | None,
    score_command: str | None,
    api_key_file: Path | None,
    dry_run: bool,
    output: Format,
) -> None:
    """Ask the same cases of NAME@REVISION and of another revision; compare, and hold it to a gate.

    The result lies beside the record. Exit 5 if it does not pass the gate.

    \b
    Examples:
      lora-fs evaluate support@v2 --data cases.jsonl --url http://gateway:8001
      lora-fs evaluate support@v2 --data cases.jsonl --url http://gateway:8001 --gate 'regressions<=2'
    """
    from lora_fs.sidecar.cli.backends.client import read_token
    from lora_fs.sidecar.evaluation import cases
    from lora_fs.sidecar.evaluation.command_score import ByCommand
    from lora_fs.sidecar.evaluation.journal import Journal
    from lora_fs.sidecar.evaluation.running import by_expectation
    from lora_fs.sidecar.model.gates import parse

    if dry_run and journal is not None:
        raise click.UsageError("--dry-run keeps nothing, and --journal keeps answers: write one")
    url = url or context.server()
    if url is None:
        raise click.UsageError("say whom to ask: --url of a replica or a gateway")
    wanted = parse(gate) if gate is not None else None
    read = cases.check(data, scored=score_command is not None)
    score: Score = ByCommand(score_command) if score_command is not None else by_expectation
    scope = context.scope()
    records = _chosen(context.backend.named(scope, name), f"{name} of {scope}", revision, against)
    if wanted is not None and wanted.needs_baseline and len(records) == 1:
        raise click.UsageError("this gate compares, and there is nothing to compare with: give --against")
    about = {"data": read.sha256, "score_command": score_command or ""}
    about |= {f"@{record.revision}": record.spec.digest for record in records}
    key = read_token(api_key_file) if api_key_file is not None else None
    keeps = Journal(journal, about) if journal is not None else None
    run = _Run(url, records, read, concurrency, patience, keeps, score, key)
    found = asyncio.run(run.evaluate())
    evaluation = run.evaluation(found)
    if wanted is not None:
        unmet = wanted.unmet(evaluation.figures, evaluation.baseline_figures)
        told = {"gate": wanted.text, "passed": not unmet, "unmet": unmet}
        evaluation = evaluation.model_copy(update=told)
    _keep(context, evaluation, dry_run=dry_run)
    run.kept()
    if not context.printed(evaluation.model_dump(mode="json"), output, [f"{name}@{records[0].revision}"]):
        _show(context, evaluation)
        if dry_run:
            context.say("dry run: the result is not kept")
    if found.passed_by_none == read.cases:
        complain(f"no case of {data} was passed by anyone: is what they expect right?")
    if found.last_error:
        complain(f"the last error: {found.last_error}")
    if evaluation.passed is False:
        complain("\n".join(("the gate is not passed", *evaluation.unmet)))
        raise click.exceptions.Exit(INVALID)


def _chosen(named: Named, what: str, revision: str | None, against: str | None) -> tuple[Record, ...]:
    """The revision to evaluate, and the one to compare it with if there is one."""
    known = {record.revision: record for record in named.revisions}
    serves = named.pointer.revision if named.pointer is not None else None
    chosen = revision or serves
    if not known:
        raise NotFound(f"{what} is not registered")
    if chosen is None:
        raise NotFound(f"{what} serves nothing: say which revision")
    if against == chosen:
        raise click.UsageError(f"--against {against} is what is evaluated: compare it with another revision")
    other = against or (serves if serves != chosen else None)
    for one in filter(None, (chosen, other)):
        if one not in known:
            have = ", ".join(sorted(known)) or "none"
            raise NotFound(f"{what} has no revision {one!r} (registered: {have})")
    return tuple(known[one] for one in (chosen, other) if one is not None)


@dataclass(frozen=True, slots=True)
class _Run:
    """One evaluation over HTTP."""

    url: str
    records: tuple[Record, ...]
    data: Data
    concurrency: int
    patience_s: float
    journal: Journal | None
    score: Score
    key: str | None

    async def evaluate(self) -> Found:
        """Ask all cases; raises what ``running.Evaluating.run`` does."""
        import aiohttp

        from lora_fs.sidecar.cli.progress import asking
        from lora_fs.sidecar.evaluation.asking import Asker, Refused, find_model
        from lora_fs.sidecar.evaluation.patience import Patience
        from lora_fs.sidecar.evaluation.running import Evaluating

        headers = {"Authorization": f"Bearer {self.key}"} if self.key is not None else {}
        connector = aiohttp.TCPConnector(limit=self.concurrency)
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
            asker, models = Asker(session, self.url), list[str]()
            for record in self.records:
                plain = f"{record.name}@{record.revision}"
                try:
                    models.append(await find_model(asker, record.key, Patience(self.patience_s), self._away))
                except Refused as error:
                    raise OperatorError(f"{self.url} does not answer for {plain}: {error}") from error
            try:
                with asking(self.data.cases) as progress:
                    run = Evaluating(
                        asker,
                        tuple(models),
                        concurrency=self.concurrency,
                        patience_s=self.patience_s,
                        journal=self.journal,
                        score=self.score,
                        progress=progress,
                    )
                    return await run.run(self.data)
            finally:
                if self.journal is not None:
                    self.journal.close(done=False)

    def kept(self) -> None:
        """Remove the journal: nobody has to resume the run."""
        if self.journal is not None:
            self.journal.close(done=True)

    def _away(self, error: Exception) -> None:
        complain(f"{error}: evaluate asks again for {self.patience_s:g} s")

    def evaluation(self, found: Found) -> Evaluation:
        """The stored evaluation."""
        from lora_fs.sidecar.model.evaluation import Evaluation, Measured

        record = self.records[0]
        measured = [
            Measured(revision=one.revision, digest=one.spec.digest, figures=totals.figures())
            for one, totals in zip(self.records, found.totals, strict=True)
        ]
        return Evaluation(
            namespace=record.namespace,
            model=record.model,
            name=record.name,
            data=self.data.path.name,
            data_sha256=self.data.sha256,
            cases=self.data.cases,
            concurrency=self.concurrency,
            measured=measured[0],
            baseline=measured[1] if len(measured) > 1 else None,
            compared=found.pairs.figures(CONFIDENCE) if len(measured) > 1 else {},
            flips=tuple(sorted(found.flips, key=lambda flip: flip.line)),
            updated_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        )


def _keep(context: Context, evaluation: Evaluation, *, dry_run: bool) -> None:
    from lora_fs.sidecar.registry.lifecycle.acts import Evaluate

    context.backend.do(context.scope(), evaluation.name, Evaluate(evaluation=evaluation, dry_run=dry_run))
    context.noted.update(revision=evaluation.measured.revision, passed=evaluation.passed)


def _show(context: Context, evaluation: Evaluation) -> None:
    both = [one for one in (evaluation.measured, evaluation.baseline) if one is not None]
    figures = list(evaluation.measured.figures)
    columns = ("FIGURE", *(f"{evaluation.name}@{one.revision}" for one in both))
    context.table(columns, [(figure, *(_number(one.figures, figure) for one in both)) for figure in figures])
    told = evaluation.compared
    if told:
        context.say(
            f"difference {told['difference']:+.4f}, {CONFIDENCE:.0%} interval "
            f"[{told['difference_low']:+.4f}, {told['difference_high']:+.4f}]; "
            f"{told['improvements']:.0f} improvements, {told['regressions']:.0f} regressions, "
            f"p_worse {told['p_worse']:.2g}"
        )
    for flip in evaluation.flips[:10]:
        what = "regression" if flip.regression else "improvement"
        context.say(f"  {what} in line {flip.line}{f' ({flip.id})' if flip.id else ''}")
    if len(evaluation.flips) > 10:
        context.say(f"  and {len(evaluation.flips) - 10} more: -o json")
    if evaluation.passed:
        context.say(f"the gate is passed: {evaluation.gate}")


def _number(figures: Mapping[str, float], figure: str) -> str:
    return f"{figures[figure]:.4g}" if figure in figures else "unknown"


COMMANDS = (evaluate,)
