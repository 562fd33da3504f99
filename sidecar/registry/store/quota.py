"""Quotas: what a namespace may register, and what it has. One file says it to every writer.

A writer in a namespace that has a quota holds its lease, counts, writes, and counts again. A lease proves
nothing. But of two writers that both got past it at least the later one sees both, and takes its own back.
So nobody exceeds a quota for longer than that takes. A quota never refuses to withdraw or promote, nor
anything else that makes nothing grow.

The rate counts by the writers' clocks: clocks that differ by seconds misjudge it by as many.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

from lora_fs.sidecar.errors import (
    CorruptRecord,
    NewerRecord,
    OperatorError,
    OverQuota,
    TooManyRegistrations,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import AdapterKey, Quota, Record
from lora_fs.sidecar.registry.format.ids import written_at
from lora_fs.sidecar.registry.format.layout import QUOTA, Generation
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.leases import LEASE_S, lease

WINDOW_S = 60.0
WAIT_S = LEASE_S + 5.0  # long enough to take over from a dead holder

_ANEW = (
    "nothing is registered there until `lora-fs quota` is given --adapters, --bytes, --per-minute and "
    "--require-evaluation, or --remove"
)
_NEWER = "nothing is registered there until you upgrade, or give the quota up with `lora-fs quota --remove`"

Now = Callable[[], datetime.datetime]
_Histories = Callable[[], Mapping[str, Sequence[Generation]]]


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of a namespace. ``recent``: ages in seconds of the last minute's registrations."""

    names: frozenset[tuple[str, str]]  # (model, name)
    sizes: dict[AdapterKey, int]
    recent: tuple[float, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class _Seen:
    """One generation's share of the use, without its body."""

    present: bool
    digest: str
    size_bytes: int
    at: datetime.datetime | None

    def registers(self, before: _Seen) -> bool:
        """Whether it brought bytes into service, and did not only change what is said of them."""
        return self.present and not (before.present and before.digest == self.digest)


def _utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class Accounts:
    """Counts for one registry. A body never changes, so each is read once by a process."""

    def __init__(self, reader: Reader, now: Now = _utc_now) -> None:
        self._reader, self._now = reader, now
        self._seen: dict[tuple[AdapterKey, Generation], _Seen] = {}

    def quota(self, namespace: str) -> Quota | None:
        """Return the namespace's limits; None if it has none.

        Raises:
            OperatorError: its quota makes no sense, so nobody knows it.
            VolumeUnavailable: the volume did not answer.
        """
        path = self._reader.layout.quota(namespace)
        if QUOTA not in (atomic.list_names(path.parent) or ()):
            return None  # not opened to know it: see ``atomic``
        try:
            data = atomic.read_bytes(path)
            quota = decode(Quota, data) if data is not None else None
        except (CorruptRecord, atomic.NotRegular) as error:
            way_out = _NEWER if isinstance(error, NewerRecord) else _ANEW
            raise OperatorError(f"{path}: {error}: {way_out}") from error
        if quota is not None and quota.namespace != namespace:
            raise OperatorError(f"{path} is the quota of {quota.namespace}: {_ANEW}")
        return quota

    def write(self, quota: Quota) -> None:
        """Let a quota be in force, from the next registration on. It survives a power loss."""
        path = self._reader.layout.quota(quota.namespace)
        make_folder(path.parent, root=self._reader.layout.root)
        atomic.replace(path, seal(quota), sync=True)

    def remove(self, namespace: str) -> None:
        """Let nothing bound the namespace any more."""
        path = self._reader.layout.quota(namespace)
        with atomic.explained(f"cannot remove {path}"):
            path.unlink(missing_ok=True)
        if atomic.is_folder(path.parent):
            atomic.sync_names(path.parent)

    def usage(self, namespace: str) -> Usage:
        """Count the registrations of a namespace, of all its models.

        Raises:
            VolumeUnavailable: the volume did not list or read something, so nobody knows.
        """
        names: set[tuple[str, str]] = set()
        sizes: dict[AdapterKey, int] = {}
        recent: list[float] = []
        listed: set[tuple[AdapterKey, Generation]] = set()
        for scope in self._reader.scopes(namespace):
            for revision, entries in self._reader.scan(scope).revisions.items():
                histories = cache(entries.histories)  # parsed only where something is recent
                for name, newest in entries.records.items():
                    key = AdapterKey(*scope, revision, name)
                    listed.add((key, newest))
                    found = self._in_force(key, newest)
                    if found is not None and found.present:
                        names.add((scope.model, name))
                        sizes[key] = found.size_bytes
                    recent += self._recent(key, found, histories)
        for key, generation in [*self._seen]:
            if key.namespace == namespace and (key, generation) not in listed:
                self._seen.pop((key, generation), None)
        return Usage(frozenset(names), sizes, tuple(sorted(recent)))

    @contextmanager
    def admitted(
        self, quota: Quota | None, key: AdapterKey, size_bytes: int, *, wait_s: float = WAIT_S
    ) -> Iterator[Callable[[], OverQuota | None]]:
        """Let the block write one record that says present, if the namespace's quota allows it.

        Yields a function to call after the write. It returns why the write must be taken back, if another
        writer got past the lease and both together exceed the quota.

        Args:
            size_bytes: what the revision will have.
            wait_s: how long to wait for another writer of the namespace.
        Raises:
            OverQuota, TooManyRegistrations: it does not fit; no write happened.
            VolumeUnavailable: another writer is at work, or the volume did not answer.
        """
        if quota is None or not _limits(quota):
            yield lambda: None
            return
        with lease(self._reader.layout.lease(f"quota-{key.namespace}"), wait_s=wait_s) as had:
            if had.is_anothers:
                raise VolumeUnavailable(
                    f"another writer registers in {key.namespace}, which has a quota: it is tried again"
                )
            before = self._check(quota, key, size_bytes)
            yield lambda: self._exceeded(quota, key, before)

    def check(self, key: AdapterKey, size_bytes: int) -> None:
        """Refuse what does not fit, without the lease: it saves the work of copying.

        Raises:
            See ``quota`` and ``admitted``.
        """
        quota = self.quota(key.namespace)
        if quota is not None and _limits(quota):
            self._check(quota, key, size_bytes)

    def _check(self, quota: Quota, key: AdapterKey, size_bytes: int) -> Usage:
        usage = self.usage(key.namespace)
        if (refusal := _too_large(quota, usage, key, size_bytes)) is not None:
            raise refusal
        allowed = quota.registrations_per_minute
        if allowed is not None and len(usage.recent) >= allowed:
            wait_s = WINDOW_S - usage.recent[allowed - 1] if allowed else WINDOW_S
            raise TooManyRegistrations(
                f"namespace {key.namespace} registered {len(usage.recent)} times in the last minute; its "
                f"quota is {allowed}: again in {wait_s:.0f} s, or raise it with `lora-fs quota --per-minute`",
                retry_after_s=max(1.0, wait_s),
            )
        return usage

    def _exceeded(self, quota: Quota, key: AdapterKey, before: Usage) -> OverQuota | None:
        usage = self.usage(key.namespace)
        size_bytes = usage.sizes.pop(key, 0)
        if not usage.sizes.keys() - before.sizes.keys():
            return None  # nobody else wrote meanwhile
        others = Usage(frozenset((k.model, k.name) for k in usage.sizes), usage.sizes, usage.recent)
        return _too_large(quota, others, key, size_bytes)

    def _in_force(self, key: AdapterKey, newest: Generation) -> _Seen | None:
        try:
            return self._read(key, newest)
        except CorruptRecord:
            record = self._reader.latest(self._reader.records(key))[1]
            return None if record is None else _seen(record)

    def _read(self, key: AdapterKey, generation: Generation) -> _Seen:
        known = self._seen.get((key, generation))
        if known is None:
            record = self._reader.read(self._reader.records(key), generation)
            known = self._seen[key, generation] = _seen(record)
        return known

    def _recent(self, key: AdapterKey, newest: _Seen | None, histories: _Histories) -> Iterator[float]:
        """Ages of the last minute's registrations; it looks at older generations only then."""
        if newest is None or self._age_s(newest) is None:
            return
        later: tuple[_Seen, float] | None = None
        for generation in sorted(histories()[key.name], reverse=True):
            try:
                seen = self._read(key, generation)
            except CorruptRecord:
                continue
            if later is not None and later[0].registers(seen):
                yield later[1]
            age_s = self._age_s(seen)
            if age_s is None:
                return
            later = seen, age_s
        if later is not None and later[0].present:  # the first generation
            yield later[1]

    def _age_s(self, seen: _Seen) -> float | None:
        """Seconds since the write; None if that is longer ago, or so far ahead that a clock is wrong."""
        if seen.at is None:
            return None
        age_s = (self._now() - seen.at).total_seconds()
        return max(0.0, age_s) if -WINDOW_S < age_s < WINDOW_S else None


def _limits(quota: Quota) -> bool:
    """Whether it limits registrations: it may set no more than how many revisions to keep."""
    bounds = (quota.adapters, quota.size_bytes, quota.registrations_per_minute)
    return any(one is not None for one in bounds)


def _too_large(quota: Quota, usage: Usage, key: AdapterKey, size_bytes: int) -> OverQuota | None:
    """Why a revision of ``size_bytes`` does not fit beside the usage; None: it does. The rate is no part."""
    before = usage.size_bytes
    grows = size_bytes - usage.sizes.get(key, 0)
    if quota.size_bytes is not None and grows > 0 and before + grows > quota.size_bytes:
        return OverQuota(
            f"{key} would need {grows} bytes more; namespace {key.namespace} uses {before} of the "
            f"{quota.size_bytes} it may: unregister what it does not need, or raise it with "
            "`lora-fs quota --bytes`"
        )
    is_new = (key.model, key.name) not in usage.names
    if quota.adapters is not None and is_new and len(usage.names) >= quota.adapters:
        return OverQuota(
            f"{key.name} would be one adapter more; namespace {key.namespace} has {len(usage.names)} of "
            f"the {quota.adapters} it may: unregister what it does not need, or raise it with "
            "`lora-fs quota --adapters`"
        )
    return None


def _seen(record: Record) -> _Seen:
    spec = record.spec
    return _Seen(record.present, spec.digest, spec.size_bytes, written_at(record.updated_at))
