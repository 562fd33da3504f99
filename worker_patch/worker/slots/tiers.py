"""Who is in the host tier, on the device and in the slots, and who makes room. Pure: no tensor, no vLLM.

*Host* is a budget of bytes, *device* a pool of bytes that its allocator knows, *slots* a fixed number. What
is on the device or in a slot is in the host tier, too. The host tier never evicts a held adapter, a pinned
one, or one that the last step used without an announcement. A slot never gives up an adapter that
the step uses, and a pinned one only if the step itself needs every slot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Eviction = Literal["lru", "fifo"]


class NoRoom(Exception):
    """All that could go to make room is in use."""


class TooLarge(NoRoom):
    """The adapter does not fit even into the empty budget."""


@dataclass(slots=True)
class Entry:
    """One adapter in the host tier.

    Attributes:
        holders: holder → the sequence number of its hold: who has requests for it.
        users: who may ask for it without a load, each holder too; when the last one drops it, it goes.
        used: a tick; the least recently used goes first, among equals of ``priority``.
        came: ticks of when it came to the host tier, to the device and to its slot: with FIFO they decide.
    """

    size_bytes: int
    priority: int = 0
    used: int = 0
    came: dict[str, int] = field(default_factory=dict)
    pinned: bool = False
    holders: dict[str, int] = field(default_factory=dict)
    users: set[str] = field(default_factory=set)


class Tiers:
    """The bookkeeping of all tiers. Ids are the adapters' integer ids.

    Attributes:
        slots: which id is in which slot.
        device: adapters in the device's memory, or on the way there.
        copies: slots copy from there, and then need it no more; else they refer to it.
        entries: the adapters of the host tier.
        used_bytes: the bytes of the budget in use: the sum of the entries'.
        step: the adapters that the running step needs, or the last one did. Only the next step changes it:
            an adapter that is removed or replaced meanwhile is still needed.
        counters: ``{cpu,gpu}_{hits,misses,evictions}``, monotonic.
    """

    def __init__(
        self, slots: int, budget_bytes: int, *, eviction: Eviction = "lru", copies: bool = False
    ) -> None:
        self.slots: list[int | None] = [None] * slots
        self.device: set[int] = set()
        self.copies, self._eviction = copies, eviction
        self.budget_bytes = budget_bytes
        self.entries: dict[int, Entry] = {}
        self.used_bytes = 0
        self.counters: Counter[str] = Counter()
        self._reserved: dict[int, int] = {}
        self.step: frozenset[int] = frozenset()
        self._counted: frozenset[int] = frozenset()  # of it, those whose next step is no beginning
        self._tick = 0

    @property
    def free_bytes(self) -> int:
        """The rest of the budget after all loads under way; may be negative."""
        return self.budget_bytes - self.used_bytes - sum(self._reserved.values())

    # -- the host tier ---------------------------------------------------------------------------

    def reserve(self, adapter: int, size_bytes: int, *, spare: bool = False) -> None:
        """Reserve room for a load. Evicts nobody yet: the load may fail.

        Args:
            spare: nobody is to go for it, then either.
        Raises:
            NoRoom: adapters in use, pinned or reserved leave too little; reserves nothing. TooLarge: the
                budget is too small.
        """
        self.cancel(adapter)
        staying = self.used_bytes
        if not spare and size_bytes > self.free_bytes:
            staying = sum(entry.size_bytes for one, entry in self.entries.items() if not self._may_go(one))
        self._see_to(size_bytes, staying + sum(self._reserved.values()), spare)
        self._reserved[adapter] = size_bytes

    def cancel(self, adapter: int) -> None:
        """Give a reservation back."""
        self._reserved.pop(adapter, None)

    def admit(
        self,
        adapter: int,
        size_bytes: int,
        *,
        priority: int | None = None,
        pinned: bool | None = None,
        spare: bool = False,
        needed: bool = False,
    ) -> list[int]:
        """Take an adapter in. Returns the adapters evicted for it. What a load reserved stays reserved.

        An entry that it replaces keeps its holders and users, and leaves the device and its slot.

        Args:
            priority, pinned: None: as the replaced entry; without one 0, and not pinned.
            needed: by the running step, whose other adapters all stay then.
        Raises:
            NoRoom: it is bigger than announced, or requests took hold of what could have gone; evicts nobody.
        """
        old = self.entries.get(adapter, Entry(0))
        taken, going = self.used_bytes - old.size_bytes, list[int]()
        if not spare and taken + size_bytes > self.budget_bytes:
            others = (one for one in self.entries if one != adapter and self._may_go(one, needed=needed))
            going = sorted(others, key=self._order("host"))
        self._see_to(size_bytes, taken - sum(self.entries[one].size_bytes for one in going), spare)
        victims = []
        for victim in going:
            if taken + size_bytes <= self.budget_bytes:
                break
            taken -= self.entries[victim].size_bytes
            self.remove(victim)
            self.counters["cpu_evictions"] += 1
            victims.append(victim)
        self._leave(adapter)
        keep = (old.pinned if pinned is None else pinned) and self._pins_left() > 0
        rank = old.priority if priority is None else priority
        self.entries[adapter] = Entry(size_bytes, rank, pinned=keep, holders=old.holders, users=old.users)
        self.used_bytes += size_bytes
        self.touch(adapter)
        self._came(adapter, "host")
        return victims

    def _see_to(self, size_bytes: int, taken_bytes: int, spare: bool) -> None:
        if size_bytes > self.budget_bytes:
            raise TooLarge(f"it takes {size_bytes} bytes, and LORA_FS_HOST_BYTES is {self.budget_bytes}")
        if taken_bytes + size_bytes > self.budget_bytes:
            by = "" if spare else ", by adapters that are in use, pinned or being loaded"
            raise NoRoom(f"{size_bytes} bytes do not fit: {taken_bytes} of {self.budget_bytes} are taken{by}")

    def remove(self, adapter: int) -> None:
        """Forget an adapter and where it is, whoever uses it; what a load of it reserved stays reserved."""
        self._counted -= {adapter}
        self._leave(adapter)

    def _leave(self, adapter: int) -> None:
        self.device.discard(adapter)
        self.vacate(adapter)
        if (entry := self.entries.pop(adapter, None)) is not None:
            self.used_bytes -= entry.size_bytes

    def touch(self, adapter: int) -> None:
        """Note that it was used now."""
        self._tick += 1
        self.entries[adapter].used = self._tick

    # -- who needs what --------------------------------------------------------------------------

    def hold(self, adapter: int, holder: str, sequence: int) -> bool:
        """``holder`` has requests for it from now on; False if it is not in the host tier."""
        entry = self.entries.get(adapter)
        self.counters["cpu_misses" if entry is None else "cpu_hits"] += 1
        if entry is None:
            return False
        self.keep(adapter, holder, sequence)
        self._counted -= {adapter}
        return True

    def keep(self, adapter: int, holder: str, sequence: int) -> None:
        """Hold what is there, as a load that ended does."""
        entry = self.entries[adapter]
        entry.holders[holder] = max(sequence, entry.holders.get(holder, 0))
        entry.users.add(holder)
        self.touch(adapter)

    def keep_holds(self, holder: str, adapters: Collection[int], sequence: int) -> None:
        """Drop ``holder``'s holds older than ``sequence``, except those of ``adapters``."""
        for adapter, entry in self.entries.items():
            if adapter not in adapters and entry.holders.get(holder, sequence) < sequence:
                del entry.holders[holder]

    def drop(self, adapter: int, user: str) -> bool:
        """``user`` needs it no more; True if nobody does and it may go."""
        entry = self.entries.get(adapter)
        if entry is None:
            return False
        entry.holders.pop(user, None)
        entry.users.discard(user)
        return not entry.users

    def goes_on(self, adapters: Collection[int]) -> bool:
        """Whether a step with these begins nothing: the last one had the same, and nobody held them since."""
        return self.step == self._counted == adapters

    def begin_step(self, adapters: Iterable[int]) -> frozenset[int]:
        """The step that begins needs these, until the next one begins. Returns those whose use begins.

        One that goes on uses nothing anew: a rank that tries a blank adapter again would evict others.
        """
        now = frozenset(adapters)
        begun, used = now - self._counted, frozenset[int]() if self.goes_on(now) else now
        for adapter in begun:
            self.counters["gpu_hits" if self.on_device(adapter) else "gpu_misses"] += 1
        self.step = self._counted = now
        for adapter in sorted(used & self.entries.keys()):  # alike on all ranks: they must evict the same
            self.touch(adapter)
        return begun

    def pin(self, adapter: int) -> None:
        """Keep it in the host tier, and in a slot once it is in one.

        Raises:
            NoRoom: pinned adapters have all slots but one.
        """
        if not self.entries[adapter].pinned and self._pins_left() <= 0:
            raise NoRoom(f"one of {len(self.slots)} slots stays free of pinned adapters")
        self.entries[adapter].pinned = True

    def prefer(self, policies: Mapping[int, tuple[int, bool]]) -> None:
        """Keep these so from now on: id → priority, and whether pinned.

        If too many are, the greatest stay pinned, of equals the lowest ids: the same for every API server.
        """
        known = {adapter: policy for adapter, policy in policies.items() if adapter in self.entries}
        for adapter, (priority, _) in known.items():
            self.entries[adapter].priority, self.entries[adapter].pinned = priority, False
        pinned = sorted((one for one in known if known[one][1]), key=lambda one: (-known[one][0], one))
        for adapter in pinned[: max(0, self._pins_left())]:
            self.entries[adapter].pinned = True

    def _pins_left(self) -> int:
        return len(self.slots) - 1 - sum(entry.pinned for entry in self.entries.values())

    def _may_go(self, adapter: int, *, needed: bool = False) -> bool:
        """Whether the host tier may evict it. ``needed``: for an adapter that the running step loads."""
        entry = self.entries[adapter]
        in_step = adapter in self.step and (needed or not entry.users)
        return not (entry.holders or entry.pinned or in_step)

    def _came(self, adapter: int, tier: str) -> None:
        self._tick += 1
        self.entries[adapter].came[tier] = self._tick

    def _order(self, tier: str) -> Callable[[int], tuple[int, int]]:
        """The order of eviction among adapters of a tier: the least goes first."""

        def order(adapter: int) -> tuple[int, int]:
            entry = self.entries[adapter]
            return entry.priority, entry.used if self._eviction == "lru" else entry.came[tier]

        return order

    # -- the device ------------------------------------------------------------------------------

    def on_device(self, adapter: int) -> bool:
        """Whether its weights are there already."""
        return adapter in self.device or adapter in self.slots

    def land(self, adapter: int) -> None:
        """Note that an adapter has its place on the device."""
        self.device.add(adapter)
        self._came(adapter, "device")

    def leaving(self, *, needed: bool) -> int:
        """Choose who leaves the device for another.

        Args:
            needed: by the running step; else nobody goes that is held or pinned, or that the step uses.
        Raises:
            NoRoom: all that is there is in use.
        """
        going = [adapter for adapter in self.device if self._may_leave(adapter, needed)]
        if not going:
            raise NoRoom("all that is in the device's memory is in use")
        order = self._order("device")
        victim = min(going, key=lambda a: (not self._spent(a), self.entries[a].pinned, order(a)))
        self.device.remove(victim)
        return victim

    def _may_leave(self, adapter: int, needed: bool) -> bool:
        in_use = adapter in self.step and not self.copies
        kept = bool(self.entries[adapter].holders) or self.entries[adapter].pinned or adapter in self.step
        return not in_use and (needed or self._spent(adapter) or not kept)

    def _spent(self, adapter: int) -> bool:
        """Whether its slot has a copy already."""
        return self.copies and adapter in self.slots

    # -- the slots -------------------------------------------------------------------------------

    def place(self, adapter: int) -> tuple[int, int | None] | None:
        """Choose a slot; returns it with who leaves it, None if it is in one already.

        Raises:
            NoRoom: the running step uses every slot.
            KeyError: the host tier lacks it.
        """
        self.entries[adapter]
        if adapter in self.slots:
            return None
        victim: int | None = None
        if None not in self.slots:
            leaving = [a for a in self.slots if a is not None and a not in self.step]
            if not leaving:
                raise NoRoom(f"all {len(self.slots)} slots are in use by this step")
            order = self._order("slot")
            victim = min(leaving, key=lambda a: (self.entries[a].pinned, order(a)))
            self.counters["gpu_evictions"] += 1
        index = self.slots.index(victim)
        self.slots[index] = adapter
        self._came(adapter, "slot")
        return index, victim

    def vacate(self, adapter: int) -> None:
        """Empty the slot it is in."""
        if adapter in self.slots:
            self.slots[self.slots.index(adapter)] = None
