"""The names a replica serves, made from the desired state. Pure: no I/O, no clock.

Kept by scope, as the desired state is: a catalog is made from the one before it, and takes over
the parts of the scopes in which nothing changed, and in another all but the names that did.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, TypeVar

from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.reconcile.plan import ALWAYS
from lora_fs.sidecar.registry.view.snapshot import ByScope, Desired, touched

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Served:
    """One public name and the record it stands for."""

    name: str  # what clients send as "model": "name", "namespace/name" or "name@revision"
    record: Record


@dataclass(frozen=True, slots=True)
class Trial:
    """A canary: what answers ``percent`` of the requests for a plain name, by ``name@revision``."""

    served: Served
    percent: int


class Terms(NamedTuple):
    """What a catalog is made with besides the desired state."""

    namespaces: tuple[str, ...] = ()
    engine_names: frozenset[str] = frozenset()
    default_policy: Policy = Policy()

    def always(self, record: Record) -> bool:
        """Whether it is to be loaded before anyone asks."""
        return (record.spec.policy or self.default_policy).kind in ALWAYS


@dataclass(frozen=True, slots=True)
class Part:
    """What one scope gives; the rest is as a catalog has it."""

    digests: Counter[str] = field(default_factory=Counter)  # of how many revisions each is
    served: Mapping[str, Served] = field(default_factory=dict)
    unasked: Mapping[str, Served] = field(default_factory=dict)
    conflicts: Mapping[str, Record] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)


_NOTHING = Part()


class Digests(Container[str]):
    """Of every adapter there is in some scopes."""

    def __init__(self, parts: Collection[Part]) -> None:
        self._parts = parts

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, str) and any(part.digests[digest] for part in self._parts)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything a replica serves, at one moment; ``served`` holds the plain names.

    Attributes:
        trials: plain name → its canary.
        unasked: those to be loaded before anyone asks, by name, canaries among them.
        conflicts: names not served because the engine itself has them: its base model, an
            adapter it was started with.
        source: the state it was made from.
    """

    version: int = 0
    served: Mapping[str, Served] = field(default_factory=dict)
    unasked: Mapping[str, Served] = field(default_factory=dict)
    conflicts: Mapping[str, Record] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    parts: Mapping[Scope, Part] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    source: Desired = field(default_factory=Desired)

    def in_order(self) -> Iterator[Served]:
        """What is served, sorted by name."""
        parts = self.served.parts.values() if isinstance(self.served, ByScope) else [self.served]
        return chain.from_iterable(map(part.__getitem__, sorted(part)) for part in parts)

    @property
    def digests(self) -> Container[str]:
        """Of every adapter there is, served or not."""
        return Digests(self.parts.values())

    def is_withdrawn(self, record: Record) -> bool:
        """Whether a revision that was there has a tombstone now. Absence says nothing."""
        now = self.source.records.get(record.key)
        return now is not None and not now.present

    def choose(self, served: Served, user: str | None, chance: Callable[[], float]) -> Served:
        """What answers a request for ``served``: itself, or its canary.

        Args:
            user: who asks; the same one gets the same answer on every replica, and keeps a canary
                whose share grows. None or "": nobody knows.
            chance: from 0 up to 1, drawn where nobody knows who asks.
        """
        trial = self.trials.get(served.name)
        if trial is None:
            return served
        at = place(served.record, user) if user else chance() * 100
        return trial.served if at < trial.percent else served

    def policy_of(self, served: Served, default: Policy) -> Policy:
        """A canary is loaded before it is asked for where the revision that it may replace is."""
        own = served.record.spec.policy or default
        plain, _, _ = served.name.partition("@")
        trial, active = self.trials.get(plain), self.served.get(plain)
        if trial is None or active is None or trial.served.record is not served.record:
            return own
        of_active = active.record.spec.policy or default
        return of_active if of_active.kind in ALWAYS else own


def place(record: Record, user: str) -> int:
    """Where in 0 … 99 a user stands for all revisions of a name: a canary answers those below its percent."""
    who = f"{record.namespace}/{record.name}/{user}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(who).digest()[:8]) * 100 >> 64


def public_name(scope: Scope, name: str, namespaces: Collection[str]) -> str:
    """``name`` where one namespace is served, ``namespace/name`` where several are."""
    return name if len(namespaces) == 1 else f"{scope.namespace}/{name}"


def namespace_of(name: str, namespaces: tuple[str, ...]) -> str | None:
    """The namespace that a name registered over HTTP belongs to; None if it is not served here.

    Where several are served a name without one is of the first.
    """
    namespace, slash, _ = name.partition("/")
    if not slash or len(namespaces) == 1:
        return namespaces[0]
    return namespace if namespace in namespaces else None


def full_name(name: str, namespaces: tuple[str, ...]) -> str:
    """What clients send for a name of an admin call, which may lack its namespace: see ``namespace_of``."""
    return name if "/" in name or len(namespaces) == 1 else f"{namespaces[0]}/{name}"


def build(
    desired: Desired,
    namespaces: Collection[str],
    engine_names: Collection[str],
    version: int,
    default_policy: Policy,
    before: Catalog | None = None,
) -> Catalog:
    """Name every active record; a name the engine itself has keeps meaning what it means there.

    Args:
        before: an earlier catalog, of which is taken over what did not change.
    """
    terms = Terms(tuple(namespaces), frozenset(engine_names), default_policy)
    last = before if before is not None and before.terms == terms else Catalog()
    keys: dict[Scope, list[AdapterKey]] = defaultdict(list)
    for key in touched(last.source.records, desired.records):
        keys[key.scope].append(key)
    names: dict[Scope, dict[str, None]] = defaultdict(dict)  # in order
    for scope, name in touched(last.source.pointers, desired.pointers):
        names[scope][name] = None
    for scope in keys:
        names[scope] |= dict.fromkeys(key.name for key in keys[scope])
    scopes = desired.records.parts.keys() | desired.pointers.parts.keys()
    parts = {scope: last.parts.get(scope, _NOTHING) for scope in sorted(scopes, key=_order)}
    for scope in names.keys() & scopes:
        parts[scope] = _part(parts[scope], scope, keys[scope], names[scope], last.source, desired, terms)
    several = len(namespaces) > 1
    homes = {scope.namespace if several else "": scope for scope in parts}

    def home(name: str) -> Scope:
        return homes[name.partition("/")[0] if several else ""]

    def whole(tables: Iterable[Mapping[str, Value]]) -> ByScope[str, Value]:
        return ByScope(home, dict(zip(parts, tables, strict=True)))

    every = parts.values()
    renamed = [public_name(scope, name, namespaces) for scope in names for name in names[scope]]
    earlier = last.served if isinstance(last.served, ByScope) else None
    return Catalog(
        version,
        ByScope(home, {scope: part.served for scope, part in parts.items()}, earlier, renamed),
        whole(part.unasked for part in every),
        whole(part.conflicts for part in every),
        whole(part.trials for part in every),
        parts,
        terms,
        desired,
    )


def _order(scope: Scope) -> str:
    return f"{scope.namespace}/"


def _part(
    last: Part,
    scope: Scope,
    keys: Iterable[AdapterKey],
    names: Iterable[str],
    before: Desired,
    after: Desired,
    terms: Terms,
) -> Part:
    """``last`` but for the ``names`` that changed, and the records that did (``keys``)."""
    records, pointers = after.records_of(scope), after.pointers.parts.get(scope, {})
    digests = Counter(last.digests)
    for key in keys:
        for count, record in ((-1, before.records.get(key)), (1, records.get(key))):
            if record is not None and record.present:
                digests[record.spec.digest] += count
    served, unasked = dict(last.served), dict(last.unasked)
    conflicts, trials = dict(last.conflicts), dict(last.trials)
    for bare in names:
        name = public_name(scope, bare, terms.namespaces)
        former = trials.pop(name, None)
        if former is not None:
            unasked.pop(former.served.name, None)
        unasked.pop(name, None)
        conflicts.pop(name, None)
        pointer = pointers.get((scope, bare))
        active = _present(records, scope, bare, pointer.revision if pointer is not None else None)
        if pointer is None or active is None:
            served.pop(name, None)
            continue
        if name in terms.engine_names:
            conflicts[name] = active
            continue
        served[name] = Served(name, active)
        if terms.always(active):
            unasked[name] = served[name]
        canary = pointer.canary
        tried = _present(records, scope, bare, canary.revision if canary is not None else None)
        if canary is None or tried is None or tried is active:
            continue
        trial = Served(f"{name}@{tried.revision}", tried)
        if trial.name in terms.engine_names:  # it could not be found by it
            continue
        trials[name] = Trial(trial, canary.percent)
        if terms.always(active) or terms.always(tried):
            unasked[trial.name] = trial
    return Part(digests, served, unasked, conflicts, trials)


def _present(
    records: Mapping[AdapterKey, Record], scope: Scope, name: str, revision: str | None
) -> Record | None:
    record = records.get(AdapterKey(*scope, revision, name)) if revision is not None else None
    return record if record is not None and record.present else None


def find(
    catalog: Catalog, desired: Desired, model: str, namespaces: tuple[str, ...], name: str
) -> Served | None:
    """Resolve a plain name or ``name@revision``; a look-up in memory, whatever the name is.

    A name of the engine's own is none, with an ``@`` in it or without.
    """
    if name in catalog.terms.engine_names:
        return None
    served = catalog.served.get(name)
    if served is not None:
        return served
    plain, at, revision = name.rpartition("@")
    scoped = _scoped(model, namespaces, plain) if at and plain not in catalog.conflicts else None
    if scoped is None:
        return None
    record = desired.records.get(AdapterKey(*scoped[0], revision, scoped[1]))
    return Served(name, record) if record is not None and record.present else None


def is_withdrawn(desired: Desired, model: str, namespaces: tuple[str, ...], name: str) -> bool:
    """Whether the volume says that ``name`` is gone: by a tombstone. Absence says nothing."""
    plain, at, revision = name.rpartition("@")
    scoped = _scoped(model, namespaces, plain if at else name)
    if scoped is None:
        return False
    pointer = desired.pointers.get(scoped)
    if not at and (pointer is None or pointer.revision is None):
        return pointer is not None
    wanted = revision if at else str(pointer and pointer.revision)
    record = desired.records.get(AdapterKey(*scoped[0], wanted, scoped[1]))
    return record is not None and not record.present


def _scoped(model: str, namespaces: tuple[str, ...], plain: str) -> tuple[Scope, str] | None:
    namespace, slash, bare = plain.partition("/")
    if bool(slash) != (len(namespaces) > 1):
        return None
    if not slash:
        namespace, bare = namespaces[0], plain
    return (Scope(namespace, model), bare) if namespace in namespaces else None
