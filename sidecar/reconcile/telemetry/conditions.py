"""Whether a replica can serve, and since when things are as they are: phases, conditions as in Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lora_fs.sidecar.model import AdapterStatus, Condition, Phase
from lora_fs.sidecar.reconcile.telemetry.events import Now, utc_now

# ``Available``: a request for it gets an answer, if need be after a load. ``Loaded``: the engine has it.
TYPES: Mapping[str, Callable[[Phase], bool]] = {
    "Available": lambda phase: phase not in (Phase.FAILED, Phase.DRAINING),
    "Loaded": lambda phase: phase in (Phase.READY, Phase.DRAINING),
}


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether this replica can serve, and why not.

    Attributes:
        conditions: such as "EngineUnavailable: connection refused".
        since: when each kind of them began, in RFC 3339.
    """

    ready: bool
    conditions: tuple[str, ...]
    since: Mapping[str, str] = field(default_factory=dict)


class Since:
    """Remembers, by public name, what changed when. Names it never saw are as they were at the start."""

    def __init__(self, now: Now = utc_now) -> None:
        self._now = now
        # The last ones, without a time and with it.
        self._stamped: dict[str, tuple[AdapterStatus, AdapterStatus]] = {}
        self._at_first = {kind: (holds(Phase.UNLOADED), self._time()) for kind, holds in TYPES.items()}
        self._conditions: dict[str, dict[str, tuple[bool, str]]] = {}  # of names that are or were another way
        self._noted: set[str] = set()  # new since the last call of ``keep_only``
        self._began: dict[str, str] = {}  # kinds of the replica's own conditions

    def began(self, conditions: Iterable[str]) -> dict[str, str]:
        """When each kind of the replica's own conditions began. Forgets a kind that is over."""
        at = self._time()
        kinds = {one.partition(":")[0] for one in conditions}
        self._began = {kind: self._began.get(kind, at) for kind in sorted(kinds)}
        return dict(self._began)

    def stamp(self, told: Mapping[str, AdapterStatus]) -> dict[str, AdapterStatus]:
        """The same statuses, each with the time since which its phase is what it is."""
        at = self._time()
        for name in self._stamped.keys() - told.keys():  # evicted, or gone
            self._note(name, Phase.UNLOADED, at)
        stamped = {}
        for name, status in told.items():
            last = self._stamped.get(name)
            if last is None or last[0] is not status:
                since = last[1].since if last is not None and last[1].phase is status.phase else at
                last = status, status.model_copy(update={"since": since})
                self._note(name, status.phase, at)
            stamped[name] = last
        self._stamped = stamped
        return {name: dated for name, (_, dated) in stamped.items()}

    def conditions(self, name: str, status: AdapterStatus) -> tuple[Condition, ...]:
        """The conditions of a name now. A status without a stamp changed now."""
        known = self._note(name, status.phase, self._time())
        return tuple(
            Condition(
                type=kind,
                status="True" if holds else "False",
                reason=status.reason or status.phase.value,
                message=status.message,
                lastTransitionTime=at,
            )
            for kind, (holds, at) in known.items()
        )

    def keep_only(self, is_served: Callable[[str], bool], changed: Iterable[str]) -> None:
        """Forget names that are no longer served, among those ``changed`` and those just noted."""
        noted, self._noted = self._noted, set()
        for name in noted.union(changed):
            if name in self._stamped:
                self._noted.add(name)
            elif not is_served(name):
                self._conditions.pop(name, None)

    def _note(self, name: str, phase: Phase, at: str) -> dict[str, tuple[bool, str]]:
        known = self._conditions.get(name, self._at_first)
        held = {kind: holds(phase) for kind, holds in TYPES.items()}
        now = {kind: known[kind] if known[kind][0] == held[kind] else (held[kind], at) for kind in TYPES}
        if now != known:
            self._conditions[name] = now
            self._noted.add(name)
        return now

    def _time(self) -> str:
        return self._now().isoformat(timespec="seconds")
