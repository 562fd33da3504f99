"""What a pass decides about: the names the engine holds and those it might, each with its policy here.

Names of the engine come in, as they were read last; ``plan`` takes what is made of them. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable

from lora_fs.sidecar.model import Policy, PolicyKind, public_of, tells_bytes
from lora_fs.sidecar.reconcile import plan
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.names import Names
from lora_fs.sidecar.reconcile.placement import Part, policy_there
from lora_fs.sidecar.reconcile.residents.loading import Residents
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.looks import digest_at

PartOf = Callable[[Served], Part]


class Subjects:
    """The input of one replica's plan.

    Args:
        max_loaded: how many adapters may be loaded; None: the engine's own bound.
        part_of: what this replica is to an adapter; None: a home.
    """

    def __init__(
        self,
        names: Names,
        residents: Residents,
        stager: Stager,
        max_loaded: int | None,
        part_of: PartOf | None = None,
    ) -> None:
        self._names, self._residents, self._stager = names, residents, stager
        self._max_loaded, self._part_of = max_loaded, part_of
        self._to_preload: frozenset[str] | None = None  # at boot, if everything fits

    def resident(self) -> list[plan.Resident]:
        """The loaded adapters, including those on which the volume is silent."""
        names, residents, found = self._names, self._residents, []
        for name, path, leaving in residents.places():
            public, told = public_of(name), tells_bytes(name, digest_at(path))
            served = names.lookup(public)
            unknown = served is None and (  # or this replica served other namespaces before
                names.terms.scoped(public) is not None and not names.catalog().is_withdrawn(public)
            )
            found.append(
                plan.Resident(
                    name,
                    served.record if served is not None else None,
                    told and served is not None and self._stager.path(served.record) == path,
                    residents.in_flight(name),
                    residents.idle_s(name),
                    self._policy(public, served),
                    names.terms.home(public).namespace,
                    leaving,
                    unknown,
                    outdated=not told,
                )
            )
        return found

    def absent(self) -> list[plan.Absent]:
        """Adapters to load before any request that are not loaded."""
        names, catalog = self._names, self._names.catalog()
        if self._to_preload is None:
            fits = self._max_loaded is not None and len(catalog.served) <= self._max_loaded
            self._to_preload = frozenset(catalog.served) if fits else frozenset()
        self._to_preload -= {name.partition("@")[0] for name in self._residents.paths}
        policies = {name: Policy(kind=PolicyKind.EAGER) for name in self._to_preload}
        policies |= {name: catalog.policy_of(one) for name, one in catalog.unasked.items()}
        found = [served for served in map(names.lookup, policies) if served is not None]
        if self._part_of is not None:
            found = [served for served in found if self._part_of(served) is Part.HOME]
        self._residents.unplaced = frozenset(catalog.unasked).difference(served.name for served in found)
        missing = [served for served in found if self._residents.name_of(served) is None]
        waits, let_go = self._residents.waits, self._residents.is_let_go
        return [
            plan.Absent(
                s.name, policies[s.name], not (waits(s) or let_go(s)), names.terms.home(s.name).namespace
            )
            for s in missing
        ]

    def pin_problem(self, capacity: int | None) -> str | None:
        """The condition that more adapters are pinned than fit, in words."""
        catalog = self._names.catalog()
        here = [one for name, one in catalog.unasked.items() if name not in self._residents.unplaced]
        pinned = sum(catalog.policy_of(one).kind is PolicyKind.PINNED for one in here)
        if capacity is None or pinned < capacity:
            return None
        return (
            f"PinnedBeyondSlots: {pinned} adapters are pinned; one of {capacity} places stays for others: "
            "unpin some, or let more be loaded"
        )

    def _policy(self, name: str, served: Served | None) -> Policy:
        """A copy that the plain name does not serve, nor tries, is lazy, whatever the adapter's policy."""
        if served is None:
            return self._names.terms.default_policy
        catalog = self._names.catalog()
        plain = name.partition("@")[0]
        policy = catalog.policy_of(served)
        active, trial = catalog.served.get(plain), catalog.trials.get(plain)
        named = (active, trial.served if trial is not None else None)
        if not any(one is not None and one.record is served.record for one in named):
            return policy.model_copy(update={"kind": PolicyKind.LAZY})
        return policy if self._part_of is None else policy_there(policy, self._part_of(served))
