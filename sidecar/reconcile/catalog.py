"""The names a replica serves, made from the desired state. Pure: no I/O, no clock.

Kept by scope, as the desired state is. A catalog is made from the one before it. It takes over each scope
in which nothing changed, and of other scopes all names but those that changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from lora_fs.sidecar.model import AdapterKey, Policy, Record, Scope
from lora_fs.sidecar.reconcile.plan import ALWAYS
from lora_fs.sidecar.registry.view.snapshot import ByScope, Desired, Growing, touched


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

    model: str = ""
    namespaces: tuple[str, ...] = ("",)
    engine_names: frozenset[str] = frozenset()
    default_policy: Policy = Policy()

    def policy(self, record: Record) -> Policy:
        """Return the record's own policy, or the default."""
        return record.spec.policy or self.default_policy

    def always(self, record: Record) -> bool:
        """Whether to load it before anyone asks."""
        return self.policy(record).kind in ALWAYS

    def scoped(self, plain: str) -> tuple[Scope, str] | None:
        """Return the scope and the bare name of a public name without revision; None if it is none."""
        namespace, slash, bare = plain.partition("/")
        if bool(slash) != (len(self.namespaces) > 1):
            return None
        if not slash:
            namespace, bare = self.namespaces[0], plain
        return (Scope(namespace, self.model), bare) if namespace in self.namespaces else None

    def home(self, name: str) -> Scope:
        """Return the scope that a public name, or an engine's, has if it is one."""
        if len(self.namespaces) == 1:
            return _scope(self.namespaces[0], self.model)
        return _scope(name.partition("/")[0], self.model)


@lru_cache  # several look-ups of each request make one
def _scope(namespace: str, model: str) -> Scope:
    return Scope(namespace, model)


@dataclass(frozen=True, slots=True)
class Catalog:
    """Everything a replica serves, at one moment; ``served`` holds the plain names.

    Attributes:
        trials: plain name → its canary.
        unasked: adapters to load before any request, by name, canaries among them.
        conflicts: names this replica does not serve because the engine itself has them: its base model, an
            adapter it was started with.
        source: the state that this catalog shows.
    """

    version: int = 0
    served: Mapping[str, Served] = field(default_factory=dict)
    unasked: Mapping[str, Served] = field(default_factory=dict)
    conflicts: Mapping[str, Record] = field(default_factory=dict)
    trials: Mapping[str, Trial] = field(default_factory=dict)
    terms: Terms = field(default_factory=Terms)
    source: Desired = field(default_factory=Desired)

    def in_order(self) -> Iterator[Served]:
        """The served adapters, sorted by name."""
        parts = self.served.parts if isinstance(self.served, ByScope) else {Scope("", ""): self.served}
        in_order = sorted(parts, key=lambda scope: f"{scope.namespace}/")
        return chain.from_iterable(map(parts[scope].__getitem__, sorted(parts[scope])) for scope in in_order)

    def find(self, name: str) -> Served | None:
        """Resolve a plain name or ``name@revision``; a look-up in memory, whatever the name is.

        A name of the engine's own is none, with an ``@`` in it or without.
        """
        if name in self.terms.engine_names:
            return None
        served = self.served.get(name)
        if served is not None:
            return served
        plain, at, revision = name.rpartition("@")
        scoped = self.terms.scoped(plain) if at and plain not in self.conflicts else None
        if scoped is None:
            return None
        record = _present(self.source, *scoped, revision)
        return Served(name, record) if record is not None else None

    def is_withdrawn(self, name: str) -> bool:
        """Whether the volume says that a public name is gone: by a tombstone. Absence says nothing."""
        plain, at, revision = name.rpartition("@")
        scoped = self.terms.scoped(plain if at else name)
        if scoped is None:
            return False
        if not at:
            pointer = self.source.pointers.get(scoped)
            if pointer is None or pointer.revision is None:
                return pointer is not None
            revision = pointer.revision
        return self.has_tombstone(AdapterKey(*scoped[0], revision, scoped[1]))

    def has_tombstone(self, key: AdapterKey) -> bool:
        """Whether a revision that was there has a tombstone now. Absence says nothing."""
        now = self.source.records.get(key)
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

    def policy_of(self, served: Served) -> Policy:
        """The policy; a canary takes the active revision's if that one loads before any request."""
        plain, _, _ = served.name.partition("@")
        trial, active = self.trials.get(plain), self.served.get(plain)
        is_trial = trial is not None and trial.served.record is served.record
        if is_trial and active is not None and self.terms.always(active.record):
            return self.terms.policy(active.record)
        return self.terms.policy(served.record)


def place(record: Record, user: str) -> int:
    """Where in 0 … 99 a user stands for all revisions of a name: a canary answers those below its percent."""
    who = f"{record.namespace}/{record.name}/{user}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(who).digest()[:8]) * 100 >> 64


def public_name(scope: Scope, name: str, namespaces: Collection[str]) -> str:
    """``name`` if the replica serves one namespace, ``namespace/name`` if several."""
    return name if len(namespaces) == 1 else f"{scope.namespace}/{name}"


def namespace_of(name: str, namespaces: tuple[str, ...]) -> str | None:
    """The namespace of a name registered over HTTP; None if this replica does not serve it.

    If it serves several, a name without one belongs to the first.
    """
    namespace, slash, _ = name.partition("/")
    if not slash or len(namespaces) == 1:
        return namespaces[0]
    return namespace if namespace in namespaces else None


def full_name(name: str, namespaces: tuple[str, ...]) -> str:
    """What clients send for a name of an admin call, which may lack its namespace: see ``namespace_of``."""
    return name if "/" in name or len(namespaces) == 1 else f"{namespaces[0]}/{name}"


def build(desired: Desired, terms: Terms, version: int, before: Catalog | None = None) -> Catalog:
    """Name every active record; a name the engine itself has keeps meaning what it means there.

    Args:
        before: an earlier catalog; unchanged parts come from it.
    """
    last = before if before is not None and before.terms == terms else Catalog()
    changed = dict.fromkeys(touched(last.source.pointers, desired.pointers))
    changed |= dict.fromkeys((key.scope, key.name) for key in touched(last.source.records, desired.records))
    served, unasked, conflicts, trials = (
        Growing[str, Any](one if isinstance(one, ByScope) else ByScope(terms.home))
        for one in (last.served, last.unasked, last.conflicts, last.trials)
    )
    for scope, bare in changed:
        name, pointer = public_name(scope, bare, terms.namespaces), desired.pointers.get((scope, bare))
        canary = pointer.canary if pointer is not None else None
        active = _present(desired, scope, bare, pointer.revision if pointer is not None else None)
        tried = _present(desired, scope, bare, canary.revision if canary is not None else None)
        is_conflict = active is not None and name in terms.engine_names
        serves = Served(name, active) if active is not None and not is_conflict else None
        trial = None
        if serves is not None and tried is not None and tried is not active:
            trial = Served(f"{name}@{tried.revision}", tried)
        if trial is None or trial.name in terms.engine_names:  # it could not be found by it
            canary = trial = None
        former = trials.get(name)
        if former is not None:
            unasked.set(former.served.name, None)
        always = serves is not None and terms.always(serves.record)
        served.set(name, serves)
        unasked.set(name, serves if always else None)
        conflicts.set(name, active if is_conflict else None)
        trials.set(name, Trial(trial, canary.percent) if trial is not None and canary is not None else None)
        if trial is not None and (always or terms.always(trial.record)):
            unasked.set(trial.name, trial)
    return Catalog(
        version, served.whole(), unasked.whole(), conflicts.whole(), trials.whole(), terms, desired
    )


def _present(desired: Desired, scope: Scope, name: str, revision: str | None) -> Record | None:
    record = desired.records.get(AdapterKey(*scope, revision, name)) if revision is not None else None
    return record if record is not None and record.present else None
