"""The catalog that is made from the one before it is the one that is made from nothing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model import AdapterKey, Canary, Pointer, Policy, PolicyKind, Record, Scope, State
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Terms, build
from lora_fs.sidecar.reconcile.names import Names
from lora_fs.sidecar.reconcile.plan import ALWAYS
from lora_fs.sidecar.reconcile.watch.watcher import Volume as Watched
from lora_fs.sidecar.registry.view.snapshot import ByScope, Desired, Growing
from tests.reconcile.test_plan import RECORD

ONE = ("team",)
SEVERAL = ("team", "team-b", "team.c")  # "team-b/" sorts before "team/", and "team" before "team-b"
OF_ENGINES = ["tiny", "a", "b", "team/a", "team-b/c", "a@v1", "c@v2", "team/b@v1"]
NAMES, REVISIONS, DIGESTS = ("a", "b", "c"), ("v1", "v2"), ("1", "2")
POINTER = Pointer(
    namespace="team",
    model="tiny",
    name="a",
    generation=1,
    request_id="r",
    token="t",
    writer="test",
    updated_at="",
    revision=None,
)


def record(
    namespace: str, name: str, revision: str, digest: str, policy: Policy | None, there: bool
) -> Record:
    spec = RECORD.spec.model_copy(update={"digest": digest, "policy": policy})
    state = State.PRESENT if there else State.DELETED
    told = {"namespace": namespace, "name": name, "revision": revision, "spec": spec, "state": state}
    return RECORD.model_copy(update=told)


def pointer(namespace: str, name: str, revision: str | None, canary: Canary | None) -> Pointer:
    told = {"namespace": namespace, "name": name, "revision": revision, "canary": canary}
    return POINTER.model_copy(update=told)


@dataclass
class Volume:
    """The desired state as a view keeps it: parts without a change are the very ones before."""

    namespaces: tuple[str, ...]
    desired: Desired = field(default_factory=Desired)

    def write(self, *written: Record | Pointer, restored: bool = False) -> None:
        """At once; ``restored``: on top of nothing."""
        known = Desired() if restored else self.desired
        records, pointers = Growing(known.records), Growing(known.pointers)
        for one in written:
            if isinstance(one, Record):
                records.put(one.key, one)
            else:
                pointers.put((Scope(one.namespace, one.model), one.name), one)
        self.desired = Desired(records.whole(), pointers.whole())

    def fill(self, each: int) -> None:
        """So many adapters in each namespace, no two of the same bytes."""
        for namespace in self.namespaces:
            for name in (f"a{number}" for number in range(each)):
                digest = f"{namespace}-{name}"
                self.write(
                    record(namespace, name, "v1", digest, None, True), pointer(namespace, name, "v1", None)
                )

    def walk(self, chance: random.Random) -> None:
        """Something is written: any record or pointer there may be; rarely all is as in an old backup."""
        names = [(namespace, name) for namespace in self.namespaces for name in NAMES]
        written: list[Record | Pointer] = []
        for namespace, name in chance.sample(names, chance.randint(0, 3)):
            if chance.random() < 0.6:
                policy = chance.choice([None, *(Policy(kind=kind) for kind in PolicyKind)])
                told = chance.choice(REVISIONS), chance.choice(DIGESTS), policy, chance.random() < 0.7
                written.append(record(namespace, name, *told))
            if chance.random() < 0.6:
                canary = chance.choice([None, Canary(revision=chance.choice(REVISIONS), percent=5)])
                written.append(pointer(namespace, name, chance.choice([*REVISIONS, None]), canary))
        kept: list[Record | Pointer] = []
        if restored := chance.random() < 0.1:
            kept += [one for one in self.desired.records.values() if chance.random() < 0.6]
            kept += [one for one in self.desired.pointers.values() if chance.random() < 0.6]
        self.write(*kept, *written, restored=restored)


def parts(catalog: Catalog) -> Mapping[Scope, Mapping[str, Served]]:
    assert isinstance(catalog.served, ByScope)
    return catalog.served.parts


def said(catalog: Catalog) -> tuple[object, ...]:
    """What a catalog says; the plain names in their order."""
    trials = catalog.trials.items()
    return (
        [(one.name, one.record) for one in catalog.in_order()],
        {name: one.record for name, one in catalog.unasked.items()},
        dict(catalog.conflicts),
        {name: (one.served.name, one.served.record, one.percent) for name, one in trials},
    )


def defined(
    desired: Desired, namespaces: tuple[str, ...], engine_names: frozenset[str], default: Policy
) -> tuple[object, ...]:
    """The same in its own words: name by name, from the whole state."""
    served, unasked, conflicts, trials = {}, dict[str, Record](), {}, {}
    for (scope, bare), to in desired.pointers.items():
        name = bare if len(namespaces) == 1 else f"{scope.namespace}/{bare}"
        found = {
            revision: one
            for revision in REVISIONS
            if (one := desired.records.get(AdapterKey(*scope, revision, bare))) is not None and one.present
        }
        active = found.get(to.revision or "")
        if active is not None and name in engine_names:
            conflicts[name] = active
        elif active is not None:
            served[name] = active
            always = (active.spec.policy or default).kind in ALWAYS
            unasked |= {name: active} if always else {}
            if to.canary is not None and to.canary.revision != to.revision and to.canary.revision in found:
                tried = found[to.canary.revision]
                if f"{name}@{tried.revision}" in engine_names:
                    continue
                trials[name] = (f"{name}@{tried.revision}", tried, to.canary.percent)
                if always or (tried.spec.policy or default).kind in ALWAYS:
                    unasked[f"{name}@{tried.revision}"] = tried
    return sorted(served.items()), unasked, conflicts, trials


@given(st.integers(0, 2**32), st.sampled_from([ONE, SEVERAL]), st.sampled_from(PolicyKind))
def test_made_from_the_last_is_made_from_nothing(
    seed: int, namespaces: tuple[str, ...], kind: PolicyKind
) -> None:
    """After any changes, conflicts, canaries and restores among them, it says what it is defined to say."""
    chance, volume, default = random.Random(seed), Volume(namespaces), Policy(kind=kind)
    catalog, engine_names = Catalog(), frozenset[str]()
    names = Names(Terms("tiny", namespaces, default_policy=default), cast("Watched", volume))
    for number in range(40):
        volume.walk(chance)
        if chance.random() < 0.1:
            engine_names = frozenset(chance.sample(OF_ENGINES, 2))
        given = volume.desired, namespaces, engine_names
        terms = Terms("tiny", namespaces, engine_names, default)
        catalog = build(volume.desired, terms, number, catalog)
        assert said(catalog) == said(build(volume.desired, terms, number)) == defined(*given, default)
        there = {(one.spec.digest, one.name) for one in volume.desired.records.values() if one.present}
        assert {one for one in DIGESTS if one in names.digests()} == {digest for digest, _ in there}
        assert {one for one in product(DIGESTS, NAMES) if "/".join(one) in names.copies()} == there
        assert all(name == one.name for name, one in (*catalog.served.items(), *catalog.unasked.items()))
        assert all(catalog.find(name) is None for name in engine_names)


def test_a_change_makes_what_it_changes() -> None:
    """Other scopes' parts, and the other names of its own, are the very ones of the catalog before."""
    volume = Volume(SEVERAL)
    volume.fill(5)
    terms = Terms("tiny", SEVERAL)
    before = build(volume.desired, terms, 1)
    volume.write(record("team", "a3", "v1", "new", None, True))
    after = build(volume.desired, terms, 2, before)
    others = [scope for scope in parts(after) if scope.namespace != "team"]
    assert len(others) == 2
    assert all(parts(after)[scope] is parts(before)[scope] for scope in others)
    assert [name for name, one in after.served.items() if before.served[name] is not one] == ["team/a3"]
    again = build(replace(volume.desired, frozen="in doubt"), terms, 3, after)
    assert again.served is after.served


def test_names_that_are_none_are_not_found() -> None:
    """Whatever is asked for, with one namespace and with several: a look-up raises nothing."""
    odd = ("", "/", "a0/", "/a0", "team", "team/", "team/a0/", "other/a0", "team-b", "a0@", "@v1", "team/@v1")
    for namespaces in (ONE, SEVERAL):
        volume = Volume(namespaces)
        volume.fill(2)
        terms = Terms("tiny", namespaces)
        catalog = build(volume.desired, terms, 1)
        for name in (*odd, "a9", "team/a9"):
            assert name not in catalog.served
            assert catalog.find(name) is None
        assert Catalog().served.get("a") is None
        nothing = build(Desired(), terms, 1)
        assert [nothing.served.get(name) for name in odd] == [None] * len(odd)


def test_a_name_of_the_engines_own_with_a_revision_in_it() -> None:
    """It keeps its meaning; other revisions of the name are found, as are those that no engine's name is."""
    volume = Volume(ONE)
    for revision in ("v1", "v2"):
        volume.write(record("team", "base", revision, revision, None, True))
    volume.write(pointer("team", "base", "v2", Canary(revision="v1", percent=50)))
    names = ("base", "base@v1", "base@v2")

    def found(*engine_names: str) -> list[bool]:
        catalog = build(volume.desired, Terms("tiny", ONE, frozenset(engine_names)), 1)
        assert all(one.served.name not in engine_names for one in catalog.trials.values())
        return [catalog.find(name) is not None for name in names]

    assert found() == [True, True, True]
    assert found("base@v1") == [True, False, True]
    assert found("base") == [False, False, False]


@pytest.mark.parametrize(
    ("namespaces", "name", "found"),
    [
        (ONE, "a", ("team", "a")),
        (ONE, "team/a", None),
        (SEVERAL, "a", None),
        (SEVERAL, "team-b/a", ("team-b", "a")),
        (SEVERAL, "other/a", None),
    ],
)
def test_a_name_has_a_namespace_where_the_replica_serves_several(
    namespaces: tuple[str, ...], name: str, found: tuple[str, str] | None
) -> None:
    """And none of another namespace is a name here."""
    terms = Terms("tiny", namespaces)
    scoped = terms.scoped(name)
    assert scoped == (found and (Scope(found[0], "tiny"), found[1]))
    assert scoped is None or terms.home(name) == scoped[0]


def test_what_the_volume_withdrew_is_told_by_its_tombstones() -> None:
    """A name by its pointer and by what that names, a revision by its own record; absence says nothing."""
    volume = Volume(ONE)
    volume.write(
        record("team", "a", "v1", "1", None, False),
        record("team", "a", "v2", "2", None, True),
        pointer("team", "a", "v2", None),
        record("team", "b", "v1", "1", None, False),
        pointer("team", "b", None, None),
        record("team", "c", "v1", "1", None, False),
        pointer("team", "c", "v1", None),
        record("team", "d", "v1", "1", None, False),
    )
    catalog = build(volume.desired, Terms("tiny", ONE), 1)
    names = [f"{name}{at}" for name in "abcde" for at in ("", "@v1", "@v2")]
    withdrawn = {name for name in (*names, "other/a") if catalog.is_withdrawn(name)}
    assert withdrawn == {"a@v1", "b", "b@v1", "c", "c@v1", "d@v1"}
