"""Writers and readers as real processes on a pair of mounts, killed and started again; then the history.

Each writer notes an append before it begins and when it was acknowledged, each reader every
generation that it comes to believe, by one clock. ``judge`` replays the
notes against what the volume holds in the end. Nothing is shared with a process that is killed but
its own file of notes, outside the volume. ``drive`` may run on several hosts at once: one of them then judges
the notes of all.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn

from lora_fs.sidecar.errors import CorruptRecord, InputError, TemporaryError
from lora_fs.sidecar.model import AdapterKey, Pointer, Record, Scope
from lora_fs.sidecar.registry.drops.adopt import Adopter
from lora_fs.sidecar.registry.format.layout import parse_generation
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired, RegistryView
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")
NAMES = [f"a{number}" for number in range(4)]
DROPPED = "d1"  # the revision that folders are dropped in; others are registered
GIVE_UP_S = 120.0

clock = time.CLOCK_MONOTONIC  # of the notes; several hosts have no such one in common


@dataclass
class Run:
    """What was done, and what was found wrong; each a sentence."""

    appends: int = 0
    kills: int = 0
    sights: int = 0
    generations: int = 0
    siblings: int = 0  # files beside another of their generation, where there are no links
    halves: int = 0  # files of killed writers that nobody can read, where there are no links
    settled_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pace:
    """How readers look, which is a matter of the filesystem; in seconds.

    Attributes:
        poll_s: between two looks at HEAD.
        scan_s: between two looks at the tree, whatever HEAD says.
        lag_s: for how long a listing may lack what HEAD announced.
        settle_s: for how long a dropped folder holds still.
        quiet_s: where nothing has moved for so long after the writers' end, nothing will.
        within_s: how soon after the last write all readers agree.
    """

    poll_s: float = 0.02
    scan_s: float = 0.2
    lag_s: float = 0.0
    settle_s: float = 0.2
    quiet_s: float = 7.2
    within_s: float = 10.0


def converge(
    pair: tuple[Path, Path],
    notes: Path,
    *,
    writers: int,
    readers: int,
    appends: int,
    kills: int,
    pace: Pace = Pace(),
    adopting: bool = True,
    seed: int = 0,
) -> Run:
    """Write until there are so many acknowledged appends, killing as often, and judge.

    Args:
        pair: one registry's root by two mounts, or twice by the same; made a registry already.
        notes: an empty folder outside the volume.
        adopting: folders are dropped, and each reader adopts them: it is a writer, too.
    """
    run = Run()
    ended = drive(pair, notes, run, writers, readers, appends, kills, pace, adopting, seed)
    judge(pair[0], notes, run, ended, pace.within_s, writers=writers + readers * adopting)
    return run


def drive(
    pair: tuple[Path, Path],
    notes: Path,
    run: Run,
    writers: int,
    readers: int,
    appends: int,
    kills: int,
    pace: Pace,
    adopting: bool,
    seed: int,
) -> float:
    """Do ``converge``'s part of one host; return when its writers ended, by ``clock``."""
    chance = random.Random(seed)
    sources = [write_adapter(notes / f"source-{number}", number) for number in range(3)]
    stop, stopping = os.pipe()
    rest, resting = os.pipe()
    processes: list[tuple[int, Callable[[], int]]] = []
    logs: dict[int, Path] = {}
    started = 0

    def start(kind: Callable[..., NoReturn], side: int, *more: Any) -> Callable[[], int]:
        def begin() -> int:
            nonlocal started
            started += 1
            log, child = notes / f"{kind.__name__}-{started}.log", os.fork()
            if child == 0:
                os.close(stopping)
                os.close(resting)
                kind(pair[side], log, stop, started + seed, *more)
            logs[child] = log
            return child

        return begin

    for number in range(writers):
        begin = start(_write, number % 2, sources, adopting)
        processes.append((begin(), begin))
    for number in range(readers):
        begin = start(_read, (number + 1) % 2, rest, pace, adopting)
        processes.append((begin(), begin))
    try:
        deadline, last = time.monotonic() + GIVE_UP_S, 0
        while (run.appends < appends or run.kills < kills) and time.monotonic() < deadline:
            run.appends = sum(1 for _ in _noted(notes, "_write", "ack"))
            if run.appends > last:
                deadline, last = time.monotonic() + GIVE_UP_S, run.appends
            if run.kills < kills * run.appends / appends:
                at = chance.randrange(len(processes))
                pid, begin = processes[at]
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                processes[at] = (begin(), begin)
                run.kills += 1
            select.select([], [], [], 0.02)
        if run.appends < appends:
            run.wrong.append(f"nobody could write for {GIVE_UP_S} s after {run.appends} appends")
    finally:
        for pid, _ in processes[:writers]:
            os.kill(pid, signal.SIGTERM)
            os.waitpid(pid, 0)
        ended = time.clock_gettime(clock)
        os.close(stopping)
        _await_rest([logs[pid] for pid, _ in processes[writers:]])
        os.close(resting)
        for pid, _ in processes[writers:]:
            _, status = os.waitpid(pid, 0)
            if status:
                run.wrong.append(f"a reader ended with status {status}")
    return ended


def _await_rest(logs: list[Path]) -> None:
    """Wait until all readers are quiet at once: one that has no processor may adopt long after the others."""
    until = time.monotonic() + GIVE_UP_S
    while not all(map(_is_quiet, logs)) and time.monotonic() < until:
        select.select([], [], [], 0.1)


def _is_quiet(log: Path) -> bool:
    """Whether a reader has seen nothing new for ``quiet_s``, or broke."""
    said = [told for told in _lines(log) if told[0] in ("quiet", "broke")]
    return bool(said) and said[-1] != ["quiet", False]


def _write(root: Path, log: Path, stop: int, seed: int, sources: list[Path], dropping: bool) -> NoReturn:
    chance, out = random.Random(seed), log.open("w", buffering=1)

    class Noting(Registry):
        def append(self, series: Series[Body], *args: Any, **kwargs: Any) -> Body:
            begun = time.clock_gettime_ns(clock)
            body = super().append(series, *args, **kwargs)
            where = str((series.folder / series.name).relative_to(self.layout.root))
            note(out, "ack", where, body.generation, body.token, begun, time.clock_gettime_ns(clock))
            return body

    try:
        registry = Noting(root)
        acts = [_register, _register, _unregister, _promote] + [_drop, _take_away] * dropping
        while True:
            with suppress(InputError, TemporaryError):
                chance.choice(acts)(registry, chance, sources)
    except BaseException as error:
        note(out, "broke", repr(error))
    os._exit(1)


def _register(registry: Registry, chance: random.Random, sources: list[Path]) -> None:
    seed = chance.randrange(len(sources))
    put(registry, SCOPE, sources[seed], name=chance.choice(NAMES), revision=f"r{seed}")


def _unregister(registry: Registry, chance: random.Random, _: list[Path]) -> None:
    release.unregister(registry, SCOPE, chance.choice(NAMES), writer="test", all_revisions=True)


def _promote(registry: Registry, chance: random.Random, sources: list[Path]) -> None:
    revision = chance.choice([f"r{seed}" for seed in range(len(sources))])
    release.promote(registry, SCOPE, chance.choice(NAMES), revision, writer="test")


def _drop(registry: Registry, chance: random.Random, sources: list[Path]) -> None:
    target = registry.layout.artifact(AdapterKey(*SCOPE, DROPPED, chance.choice(NAMES)))
    with suppress(OSError):
        shutil.copytree(chance.choice(sources), target)


def _take_away(registry: Registry, chance: random.Random, _: list[Path]) -> None:
    target = registry.layout.artifact(AdapterKey(*SCOPE, DROPPED, chance.choice(NAMES)))
    aside = registry.layout.root.parent / f"taken-{os.getpid()}-{time.monotonic_ns()}"
    with suppress(OSError):
        target.rename(aside)
        shutil.rmtree(aside)


def _read(root: Path, log: Path, stop: int, seed: int, rest: int, pace: Pace, adopting: bool) -> NoReturn:
    """A replica's eyes: it follows, and adopts; at the end it looks on until nothing moves for anybody."""
    out = log.open("w", buffering=1)
    registry = Registry(root)
    view = RegistryView(registry, (SCOPE,), scan_s=pace.scan_s, lag_s=pace.lag_s)
    adopter = Adopter(registry, Expectation(), settle_s=pace.settle_s, writer=f"reader-{seed}")
    seen: dict[str, str] = {}
    quiet_since, stopped, quiet = time.monotonic(), False, False
    code = 0
    try:
        while not (quiet and select.select([rest], [], [], 0)[0]):
            moved = False
            begun = time.clock_gettime_ns(clock)
            with suppress(TemporaryError):
                moved = view.refresh(force=stopped)
                moved |= adopting and adopter.step(view.desired)
            for where, body in bodies(view.desired).items():
                if seen.get(where) != body.token:
                    seen[where] = body.token
                    note(out, "saw", where, body.generation, body.token, begun, time.clock_gettime_ns(clock))
            for problem in view.desired.problems.values():
                note(out, "problem", problem)
            if moved or adopter.waiting():
                quiet_since = time.monotonic()
            stopped |= bool(select.select([stop], [], [], 0 if stopped else pace.poll_s)[0])
            if stopped:
                time.sleep(pace.poll_s)
            if quiet != (stopped and time.monotonic() - quiet_since > pace.quiet_s):
                quiet = not quiet
                note(out, "quiet", quiet)
        final = {where: [body.generation, body.token] for where, body in bodies(view.desired).items()}
        note(out, "final", final, view.desired.frozen)
    except BaseException as error:
        note(out, "broke", repr(error))
        code = 1
    os._exit(code)


def bodies(desired: Desired) -> dict[str, Record | Pointer]:
    """A view's bodies by series, as the writers' notes name them."""
    records = {str(record.key): record for record in desired.records.values()}
    pointers = {f"{scope}/.active/{name}": pointer for (scope, name), pointer in desired.pointers.items()}
    return {**records, **pointers}


def note(out: IO[str], *what: Any) -> None:
    out.write(json.dumps(what) + "\n")


def _noted(notes: Path, kind: str, what: str) -> Any:
    for path in sorted(notes.rglob(f"{kind}-*.log")):
        for value in _lines(path):
            if value[0] == what:
                yield str(path.relative_to(notes)), value[1:]


def _lines(log: Path) -> Iterator[list[Any]]:
    """What was noted in whole lines: the last one of who was killed may be cut."""
    if log.exists():
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def judge(
    root: Path,
    notes: Path,
    run: Run,
    ended: float,
    within_s: float,
    *,
    writers: int = 2,
    apart_s: float = 0.0,
) -> None:
    """Replay every note against what lies on the volume.

    Args:
        writers: how many there were. One is followed in its order on every filesystem, many where a
            generation has one winner.
        apart_s: by how much the clocks of the notes may differ.
    """
    registry, wrong = Registry(root), run.wrong
    history = _history(registry, run)
    run.generations = sum(map(len, history.values()))
    acknowledged: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for who, (where, generation, token, begun, done) in _noted(notes, "_write", "ack"):
        if token not in history[where].get(generation, {}):
            wrong.append(f"{who}: generation {generation} of {where} was acknowledged and is lost")
        acknowledged[where].append((begun, done, generation))
    if registry.marker.tier == "cas" or writers == 1:
        for where, spans in acknowledged.items():
            _judge_order(where, spans, int(apart_s * 1e9), wrong)
    _judge_readers(notes, history, run, ended, within_s, fenced=registry.marker.tier == "cas")
    for kind in ("_write", "_read"):
        wrong += [f"{who}: {told}" for who, told in _noted(notes, kind, "broke")]
    view = RegistryView(registry, (SCOPE,))
    view.refresh()
    ids = [record.spec.int_id for record in view.desired.records.values() if record.present]
    if len(set(ids)) != len(ids):
        wrong.append("two adapters share an id")
    for where, body in bodies(view.desired).items():
        if [body.generation, body.token] != newest(history[where]):
            wrong.append(f"{where}: its greatest generation is not in force")


def _judge_order(where: str, spans: list[tuple[int, int, int]], apart_ns: int, wrong: list[str]) -> None:
    """Who began after another was acknowledged wrote no lower generation, or was told of it again."""
    greatest, by_end = 0, sorted(spans, key=lambda span: span[1])
    at = 0
    for begun, _, generation in sorted(spans):
        while at < len(by_end) and by_end[at][1] + apart_ns < begun:
            greatest = max(greatest, by_end[at][2])
            at += 1
        if generation < greatest:
            wrong.append(f"{where}: {generation} was begun after {greatest} was acknowledged")


Written = dict[int, dict[str, Record | Pointer]]  # of one series: by generation, by token


def newest(written: Written) -> list[Any]:
    """The generation and token in force."""
    generation = max(written)
    return [generation, max(written[generation])]


def _history(registry: Registry, run: Run) -> dict[str, Written]:
    """Every generation of every series; each has to build on the one before, so none was written asleep."""
    history: dict[str, Written] = defaultdict(lambda: defaultdict(dict))
    layout, fenced = registry.layout, registry.marker.tier == "cas"
    for folder in layout.scope(SCOPE).iterdir():
        for path in folder.iterdir():
            parsed = parse_generation(path.name)
            if parsed is None or folder.name == ".incoming":
                continue
            name, generation = parsed
            key = AdapterKey(*SCOPE, folder.name, name)
            series: Any = (
                registry.pointers(SCOPE, name) if folder.name == ".active" else registry.records(key)
            )
            try:
                body = registry.read(series, generation)
            except CorruptRecord:
                if fenced:
                    raise
                run.halves += 1  # that it was not acknowledged is told by the acknowledgements
                continue
            history[f"{SCOPE}/{folder.name}/{name}"][generation.generation][body.token] = body
    for where, written in history.items():
        if fenced and sorted(written) != list(range(1, len(written) + 1)):
            run.wrong.append(f"{where}: generations are missing: {sorted(written)}")
        sums = {body.sum: number for number, found in written.items() for body in found.values()}
        for number, found in written.items():
            run.siblings += len(found) - 1
            for body in found.values():
                before = body.previous.generation if body.previous is not None else 0
                known = sums.get(body.previous.sum) == before if body.previous is not None else True
                if not known or (before != number - 1 if fenced else before >= number):
                    run.wrong.append(f"{where}: generation {number} does not build on the one before it")
    return history


def _judge_readers(
    notes: Path, history: dict[str, Written], run: Run, ended: float, within_s: float, *, fenced: bool
) -> None:
    wrong = run.wrong
    last: dict[tuple[str, str], tuple[int, str]] = {}
    latest_ns = int(ended * 1e9)
    for who, (where, generation, token, _, seen) in _noted(notes, "_read", "saw"):
        run.sights += 1
        if token not in history[where].get(generation, {}):
            wrong.append(f"{who} saw generation {generation} of {where}, which nobody wrote")
        if (generation, token) <= last.get((who, where), (0, "")):
            wrong.append(f"{who} went back to generation {generation} of {where}")
        last[who, where] = (generation, token)
        latest_ns = max(latest_ns, seen)
    run.settled_s = latest_ns / 1e9 - ended
    if run.settled_s > within_s:
        wrong.append(f"readers agreed {run.settled_s:.1f} s after the last write")
    if fenced:  # else half records and siblings are told
        wrong += [f"{who}: {problem}" for who, problem in _noted(notes, "_read", "problem")]
    end = {where: newest(written) for where, written in history.items() if written}
    finals = list(_noted(notes, "_read", "final"))
    if not finals:
        wrong.append("no reader came to its end")
    for who, (final, frozen) in finals:
        if final != end or frozen is not None:
            told = {where: (final.get(where), end.get(where)) for where in {*final, *end}}
            differs = {where: both for where, both in told.items() if both[0] != both[1]}
            wrong.append(f"{who} ends in another state: {differs} ({frozen})")
