"""Anything in any order: a model of what was acknowledged, against an old view and a fresh one."""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lora_fs.sidecar.errors import Conflict, InputError, UnknownOutcome
from lora_fs.sidecar.model import Pointer, Policy, PolicyKind, Record, Scope
from lora_fs.sidecar.registry.format.layout import Generation, generation_name
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.maintenance.garbage import collect
from lora_fs.sidecar.registry.store.reader import Body, Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import Desired, RegistryView
from tests.registry.conftest import Clock, write_adapter
from tests.registry.test_operations import put

SCOPE = Scope("default", "tiny")
NAMES = [f"a{number}" for number in range(8)]
NAME = st.sampled_from(NAMES)
SMALL = st.integers(0, 1 << 16)


class Acknowledging(Registry):
    """Keeps every body that a writer was told is written."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, create=True)
        self.acknowledged: dict[Path, dict[int, Record | Pointer]] = defaultdict(dict)
        self.ever: dict[Path, list[Record | Pointer]] = defaultdict(list)

    def append(self, series: Series[Body], *args: Any, **kwargs: Any) -> Body:
        body = super().append(series, *args, **kwargs)
        known = self.acknowledged[series.folder / series.name].setdefault(body.generation, body)
        assert known == body, "two bodies were acknowledged for one generation"
        self.ever[series.folder / series.name].append(body)
        return body

    def forget_compacted(self) -> None:
        """Of what is not on the volume any more nothing is expected, whole series included."""
        for path, known in list(self.acknowledged.items()):
            for generation in list(known):
                if not (path.parent / generation_name(path.name, generation)).exists():
                    del known[generation]
            if not known:
                del self.acknowledged[path]


class Asleep(Registry):
    """A writer that listed a series long ago."""

    def __init__(self, path: Path, body: Record | Pointer) -> None:
        super().__init__(path)
        self._dreamt: list[Record | Pointer] = [body]

    def latest(self, series: Series[Any]) -> Any:
        if self._dreamt:
            body = self._dreamt.pop()
            return Generation(body.generation, ""), body
        return super().latest(series)


def is_withdrawn(body: Record | Pointer) -> bool:
    return not body.present if isinstance(body, Record) else body.revision is None


def bodies(desired: Desired) -> dict[Path, Record | Pointer]:
    """A view's bodies, by revision folder (or ``.active``) and name."""
    records = {Path(r.revision, r.name): r for r in desired.records.values()}
    return {**records, **{Path(".active", name): p for (_, name), p in desired.pointers.items()}}


def is_pinned(record: Record) -> bool:
    return record.spec.policy is not None and record.spec.policy.kind is PolicyKind.PINNED


def served(view: RegistryView) -> dict[str, str]:
    return {name: record.revision for _, name, record in view.desired.active()}


class RegistryMachine(RuleBasedStateMachine):
    """Writers, vandals and a volume that comes and goes, before one long-lived view."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.sources = [write_adapter(self.folder / f"source-{seed}", seed) for seed in range(3)]
        self.registry = Acknowledging(self.folder / "root")
        self.clock = Clock()
        self.view, self.sleeper = self.open_view(), self.open_view()
        self.head_was_lost = False
        self.damaged: dict[Path, set[int]] = defaultdict(set)
        self.away: list[tuple[Path, Path]] = []
        self.seen: dict[Path, Record | Pointer] = {}
        for name in NAMES:
            self.register(name, 0)

    def open_view(self) -> RegistryView:
        return RegistryView(self.registry, (SCOPE,), clock=self.clock)

    def teardown(self) -> None:
        if hasattr(self, "registry"):
            self.registry.close()
            shutil.rmtree(self.folder)

    @property
    def scope_folder(self) -> Path:
        return self.registry.layout.scope(SCOPE)

    def attempt(self, act: Callable[..., object], *args: object, **kwargs: object) -> None:
        with suppress(InputError):  # refused, as by a name that is not registered
            act(self.registry, SCOPE, *args, **kwargs)

    # -- writers -------------------------------------------------------------------------------

    @precondition(lambda self: not self.away)
    @rule(name=NAME, seed=st.integers(0, 2))
    def register(self, name: str, seed: int) -> None:
        self.attempt(put, self.sources[seed], name=name, link=True)

    @precondition(lambda self: not self.away)
    @rule(name=NAME, revision=st.sampled_from(["v1", "v2"]))
    def promote(self, name: str, revision: str) -> None:
        self.attempt(release.promote, name, revision, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME)
    def rollback(self, name: str) -> None:
        self.attempt(release.rollback, name, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME)
    def unregister(self, name: str) -> None:
        self.attempt(release.unregister, name, writer="machine", all_revisions=True)

    @precondition(lambda self: not self.away)
    @rule(name=NAME, revision=st.sampled_from([None, "v1", "v2"]), percent=st.sampled_from([0, 5, 100]))
    def try_a_revision(self, name: str, revision: str | None, percent: int) -> None:
        self.attempt(release.set_canary, name, revision, percent, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME, finish=st.booleans())
    def end_a_trial(self, name: str, finish: bool) -> None:
        self.attempt(release.end_canary, name, finish=finish, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME, kind=st.sampled_from(PolicyKind), label=st.sampled_from(["a", None]))
    def set_what_is_said(self, name: str, kind: PolicyKind, label: str | None) -> None:
        changes = [amend.with_policy(Policy(), {"kind": kind}), amend.with_labels({"l": label})]
        self.attempt(amend.amend, name, changes, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME)
    def unpin(self, name: str) -> None:
        self.attempt(amend.unpin, name, writer="machine")

    @precondition(lambda self: not self.away)
    @rule(name=NAME, count=st.sampled_from([None, 1, 2]))
    def keep_revisions(self, name: str, count: int | None) -> None:
        self.attempt(amend.keep_revisions, name, count, writer="machine")

    @precondition(lambda self: not self.away)
    @rule()
    def collect_garbage(self) -> None:
        """Withdraws what is too many, and nothing that a name serves, served before, tries, or is pinned."""
        before = {name: release.active(self.registry, SCOPE, name) for name in NAMES}
        revisions = {name: release.present_revisions(self.registry, SCOPE, name) for name in NAMES}
        kept = collect(gc.find(self.registry, SCOPE, frozenset(), 0.0, history_s=0.0))
        assert not kept
        self.registry.forget_compacted()
        for name, pointer in before.items():
            left = release.present_revisions(self.registry, SCOPE, name)
            tried = pointer.canary.revision if pointer is not None and pointer.canary is not None else None
            wanted = {pointer.revision, pointer.previous_revision, tried} if pointer is not None else set()
            gone = revisions[name].keys() - left.keys()
            assert not gone & wanted
            assert not any(is_pinned(revisions[name][revision]) for revision in gone)
            assert not gone or (pointer is not None and len(left) >= (pointer.keep_revisions or 99))
            after = release.active(self.registry, SCOPE, name)
            assert after == pointer or (after is None and pointer is not None and is_withdrawn(pointer))

    @precondition(lambda self: not self.away)
    @rule(pick=SMALL)
    def write_on_a_stale_body(self, pick: int) -> None:
        """A writer that slept tries the generation after the one it knew, taken or gone: it is refused."""
        moved_on = [path for path, bodies in self.registry.ever.items() if len(bodies) > 1]
        if moved_on:
            path = moved_on[pick % len(moved_on)]
            bodies = self.registry.ever[path]
            body = bodies[pick % (len(bodies) - 1)]
            series: Series[Any] = (
                self.registry.records(body.key)
                if isinstance(body, Record)
                else self.registry.pointers(SCOPE, body.name)
            )
            listed = self.registry.generations(series)
            if not listed or listed[0].generation <= body.generation:
                return  # all of it is gone, or it is another series
            with pytest.raises((Conflict, UnknownOutcome)):
                Asleep(self.registry.layout.root, body).append(
                    series, lambda _: {}, writer="stale", expect=body.generation
                )
            assert self.registry.generations(series) == listed

    # -- vandals -------------------------------------------------------------------------------

    @precondition(lambda self: not self.away)
    @rule(pick=SMALL, content=st.sampled_from([b"", b"garbage", b"{}", b"\0" * 64]), new=st.booleans())
    def damage(self, pick: int, content: bytes, new: bool) -> None:
        """Garbage over the newest generation, or under the name of the next one."""
        paths = sorted(self.registry.acknowledged)
        path = paths[pick % len(paths)]
        newest = max({*self.registry.acknowledged[path], *self.damaged[path]}) + new
        (path.parent / generation_name(path.name, newest)).write_bytes(content)
        self.damaged[path].add(newest)

    @rule(how=st.sampled_from(["deleted", "garbage", "empty"]))
    def lose_head(self, how: str) -> None:
        self.head_was_lost = True
        head = self.registry.layout.head
        if how == "deleted":
            head.unlink(missing_ok=True)
        else:
            head.write_bytes(b"garbage" if how == "garbage" else b"")

    @rule()
    def lose_hints(self) -> None:
        self.head_was_lost = True
        layout = self.registry.layout
        layout.head.unlink(missing_ok=True)
        for folder in (layout.leases, layout.replicas):
            shutil.rmtree(folder, ignore_errors=True)

    @precondition(lambda self: not self.away)
    @rule(what=st.sampled_from(["v1", "v2", ".active", "everything"]))
    def vanish(self, what: str) -> None:
        path = self.scope_folder if what == "everything" else self.scope_folder / what
        if path.exists():
            hidden = self.registry.layout.root / ".hidden"
            path.rename(hidden)
            self.away.append((hidden, path))

    @precondition(lambda self: self.away)
    @rule()
    def come_back(self) -> None:
        hidden, path = self.away.pop()
        hidden.rename(path)

    # -- readers -------------------------------------------------------------------------------

    @rule(force=st.booleans(), seconds=st.sampled_from([0.0, 1.0, 60.0]))
    def refresh(self, force: bool, seconds: float) -> None:
        self.clock.now += seconds
        self.view.refresh(force=force)

    @precondition(lambda self: not self.away)
    @rule()
    def wake_the_sleeper(self) -> None:
        """A reader that missed tombstones which are gone serves what a fresh one does, if HEAD says so."""
        self.sleeper.refresh(force=True)
        if not self.head_was_lost:
            fresh = self.open_view()
            fresh.refresh()
            damaged = {path.name for path, found in self.damaged.items() if found}
            held, expected = served(self.sleeper), served(fresh)
            for name in set(NAMES) - damaged:
                assert held.get(name) == expected.get(name)
        self.head_was_lost = False

    @rule()
    def restart_the_view(self) -> None:
        if not self.away:
            self.seen = {}
            self.view = self.open_view()
            self.view.refresh()

    @invariant()
    def the_old_view_only_learns(self) -> None:
        """Generations rise, only acknowledged bodies are held, and nothing goes but old tombstones."""
        held = bodies(self.view.desired)
        assert all(is_withdrawn(self.seen[where]) for where in self.seen.keys() - held.keys())
        for where, body in held.items():
            path = self.scope_folder / where
            assert body in self.registry.ever[path]
            before = self.seen.get(where)
            if before is None or before.generation not in self.registry.acknowledged.get(path, ()):
                continue
            assert body.generation >= before.generation
            assert body.generation > before.generation or body == before
        self.seen = held

    @precondition(lambda self: not self.away)
    @invariant()
    def a_fresh_view_finds_the_truth(self) -> None:
        """Of every series the newest acknowledged body that is not damaged, with or without hints."""
        fresh = self.open_view()
        fresh.refresh()
        held = bodies(fresh.desired)
        for path, known in self.registry.acknowledged.items():
            good = [body for generation, body in known.items() if generation not in self.damaged[path]]
            newest = max(good, key=lambda body: body.generation, default=None)
            assert held.get(path.relative_to(self.scope_folder)) == newest
            top = max({*known, *self.damaged[path]})
            written = path.parent / generation_name(path.name, top)
            assert (str(written) in fresh.desired.problems) == (top in self.damaged[path])

    @invariant()
    def one_scan_converges(self) -> None:
        """Forced, the old view has at least what a fresh one has; what vanished is kept and told."""
        before = served(self.view)
        self.view.refresh(force=True)
        held = bodies(self.view.desired)
        fresh = self.open_view()
        fresh.refresh()
        for where, body in bodies(fresh.desired).items():
            assert held[where].generation >= body.generation
        if self.away and self.away[0][1] == self.scope_folder:
            assert served(self.view).keys() >= before.keys() - {
                body.name for body in held.values() if isinstance(body, Record) and not body.present
            } - {body.name for body in held.values() if isinstance(body, Pointer) and not body.revision}
            gone = sum(not is_withdrawn(body) for body in self.view.desired.records.values())
            assert (self.view.desired.frozen is not None) == (gone > max(5, gone // 5))
        elif not self.away:
            assert self.view.desired.frozen is None


def steps(examples: int) -> settings:
    """How many runs, of twenty steps each."""
    everything = list(HealthCheck)
    return settings(max_examples=examples, stateful_step_count=20, suppress_health_check=everything)


TestRegistry = RegistryMachine.TestCase
TestRegistry.settings = steps(12)


@pytest.mark.long
def test_hundreds_of_runs() -> None:
    """The same, longer."""
    run_state_machine_as_test(RegistryMachine, settings=steps(400))
