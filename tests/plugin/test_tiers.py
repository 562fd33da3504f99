"""The tiers' promises, over random histories and one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lora_fs.worker_patch.worker.slots.tiers import Eviction, NoRoom, Tiers

IDS = st.integers(1, 12)
MOST = 40
SIZES = st.integers(0, MOST)
HOLDERS = st.sampled_from(["api-0", "api-1"])


class Machine(RuleBasedStateMachine):
    """Two API servers that load, hold and drop, and an engine that steps, against a plain model.

    ``used`` has the model's own ticks: adapters of one step are as recent as each other.
    """

    @initialize(
        slots=st.integers(1, 4),
        budget=st.integers(40, 120),
        room=st.integers(0, 80),
        eviction=st.sampled_from(["lru", "fifo"]),
        copies=st.booleans(),
    )
    def begin(self, slots: int, budget: int, room: int, eviction: Eviction, copies: bool) -> None:
        self.tiers = Tiers(slots, budget, eviction=eviction, copies=copies)
        self.room = (1 if copies else slots) * MOST + room  # on the device: for a step, and more
        self.eviction, self.copies = eviction, copies
        self.came: dict[str, dict[int, int]] = {"host": {}, "device": {}, "slot": {}}
        self.held: set[tuple[int, str]] = set()
        self.sequence = self.tick = 0
        self.sizes: dict[int, int] = {}
        self.used: dict[int, int] = {}
        self.reserved: dict[int, int] = {}

    def touch(self, *adapters: int) -> None:
        self.tick += 1
        self.used.update(dict.fromkeys(adapters, self.tick))

    def comes(self, adapter: int, tier: str) -> None:
        self.tick += 1
        self.came[tier][adapter] = self.tick

    def order(self, adapter: int, tier: str = "host") -> tuple[int, int]:
        """The least goes first."""
        ticks = self.used if self.eviction == "lru" else self.came[tier]
        return self.tiers.entries[adapter].priority, ticks[adapter]

    @property
    def pinned(self) -> set[int]:
        return {adapter for adapter, entry in self.tiers.entries.items() if entry.pinned}

    @property
    def may_go(self) -> set[int]:
        return self.sizes.keys() - self.pinned - {adapter for adapter, _ in self.held}

    def taken(self, adapters: Iterable[int]) -> int:
        return sum(self.sizes[adapter] for adapter in adapters)

    @rule(adapter=IDS, size=SIZES, spare=st.booleans())
    def reserve(self, adapter: int, size: int, spare: bool) -> None:
        """Nobody is evicted, and what is promised can be kept; to a spare one with all who are there."""
        if adapter in self.sizes:
            return
        self.reserved.pop(adapter, None)
        staying = self.taken(self.sizes.keys() - (set() if spare else self.may_go)) + sum(
            self.reserved.values()
        )
        try:
            self.tiers.reserve(adapter, size, spare=spare)
        except NoRoom:
            assert staying + size > self.tiers.budget_bytes
        else:
            assert staying + size <= self.tiers.budget_bytes
            self.reserved[adapter] = size

    @rule(adapter=IDS)
    def fail(self, adapter: int) -> None:
        self.tiers.cancel(adapter)
        self.reserved.pop(adapter, None)

    @rule(adapter=IDS, size=SIZES, priority=st.integers(0, 2), pin=st.booleans(), spare=st.booleans())
    def admit(self, adapter: int, size: int, priority: int, pin: bool, spare: bool) -> None:
        """The least recently used of the lowest priority go, no more than needed; for a spare one nobody."""
        if adapter in self.sizes:
            return
        self.fail(adapter)
        may_go = {} if spare else {one: self.order(one) for one in self.may_go}
        lacking = self.taken(self.sizes) + size - self.tiers.budget_bytes
        try:
            evicted = self.tiers.admit(adapter, size, priority=priority, pinned=pin, spare=spare)
        except NoRoom:
            assert lacking > self.taken(may_go)
            return
        assert self.taken(evicted) >= lacking
        assert not evicted or self.taken(evicted[:-1]) < lacking
        staying = may_go.keys() - set(evicted)
        assert all(may_go[one] <= may_go[other] for one in evicted for other in staying)
        for one in evicted:
            del self.sizes[one]
        self.tiers.entries[adapter].users.add("api-0")
        self.sizes[adapter] = size
        self.touch(adapter)
        self.comes(adapter, "host")

    @precondition(lambda self: self.sizes)
    @rule(data=st.data(), size=SIZES, needed=st.booleans())
    def replace(self, data: st.DataObject, size: int, needed: bool) -> None:
        """It keeps who holds it, its pin and its priority, and the step goes on needing it."""
        tiers, adapter = self.tiers, data.draw(st.sampled_from(sorted(self.sizes)))
        old, step = tiers.entries[adapter], tiers.step
        going = self.may_go - {adapter} - (step if needed else set())
        lacking = self.taken(self.sizes) - self.sizes[adapter] + size - tiers.budget_bytes
        try:
            evicted = tiers.admit(adapter, size, needed=needed)
        except NoRoom:
            assert lacking > self.taken(going)
            assert tiers.entries[adapter] is old
            return
        assert going >= set(evicted)
        new = tiers.entries[adapter]
        assert (new.priority, new.pinned, new.holders) == (old.priority, old.pinned, old.holders)
        assert new.users == old.users
        assert tiers.step == step
        assert not tiers.on_device(adapter)
        for one in evicted:
            del self.sizes[one]
        self.sizes[adapter] = size
        self.touch(adapter)
        self.comes(adapter, "host")

    @rule(policies=st.dictionaries(IDS, st.tuples(st.integers(0, 2), st.booleans())))
    def prefer(self, policies: dict[int, tuple[int, bool]]) -> None:
        self.tiers.prefer(policies)
        known = {adapter: policies[adapter] for adapter in policies.keys() & self.sizes.keys()}
        assert all(self.tiers.entries[adapter].priority == known[adapter][0] for adapter in known)
        assert self.pinned & known.keys() <= {adapter for adapter in known if known[adapter][1]}

    @rule(adapter=IDS, holder=HOLDERS)
    def hold(self, adapter: int, holder: str) -> None:
        self.sequence += 1
        assert self.tiers.hold(adapter, holder, self.sequence) is (adapter in self.sizes)
        if adapter in self.sizes:
            self.held.add((adapter, holder))
            self.touch(adapter)

    @rule(holder=HOLDERS, data=st.data())
    def sync(self, holder: str, data: st.DataObject) -> None:
        mine = sorted(adapter for adapter, by in self.held if by == holder)
        kept = set(data.draw(st.lists(st.sampled_from(mine), unique=True))) if mine else set()
        self.sequence += 1
        self.tiers.keep_holds(holder, kept, self.sequence)
        self.held -= {(adapter, holder) for adapter in mine if adapter not in kept}

    @rule(adapter=IDS, holder=HOLDERS)
    def drop(self, adapter: int, holder: str) -> None:
        if self.tiers.drop(adapter, holder):
            assert not any(one == adapter and by != holder for one, by in self.held)
            self.tiers.remove(adapter)
            del self.sizes[adapter]
        self.held.discard((adapter, holder))

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """As the scheduler has it: at most as many adapters as there are slots."""
        most = len(self.tiers.slots)
        batch = data.draw(st.lists(st.sampled_from(sorted(self.sizes)), max_size=most, unique=True))
        self.tiers.begin_step(batch)
        self.touch(*batch)
        for adapter in batch:
            before = list(self.tiers.slots)
            placed = self.tiers.place(adapter)
            if placed is None:
                continue
            index, victim = placed
            assert before[index] == victim
            assert (victim is None) == (None in before)
            if victim is not None:
                others = {a for a in before if a is not None} - set(batch)
                leaving = {a: (a in self.pinned, self.order(a, "slot")) for a in others}
                assert leaving[victim] == min(leaving.values())
            self.comes(adapter, "slot")
            assert self.land(adapter, needed=True), "a step has what it needs"
        assert set(batch) <= set(self.tiers.slots)

    @precondition(lambda self: self.sizes)
    @rule(data=st.data())
    def bring(self, data: st.DataObject) -> None:
        """A hold: before the step; nobody goes who is held, pinned or in the step."""
        self.land(data.draw(st.sampled_from(sorted(self.sizes))), needed=False)

    def land(self, adapter: int, *, needed: bool) -> bool:
        """As the manager does, with an allocator that has no gaps."""
        tiers = self.tiers
        while adapter not in tiers.device:
            if self.taken(tiers.device) + self.sizes[adapter] <= self.room:
                tiers.land(adapter)
                self.comes(adapter, "device")
                break
            spent = {one for one in tiers.device if self.copies and one in tiers.slots}
            stay = set() if self.copies else set(tiers.step)
            if not needed:
                stay |= self.pinned | set(tiers.step) | {one for one, _ in self.held}
            may_leave = tiers.device - (stay - spent)
            leaving = {
                one: (one not in spent, one in self.pinned, self.order(one, "device")) for one in may_leave
            }
            try:
                victim = tiers.leaving(needed=needed)
            except NoRoom:
                assert not may_leave
                return False
            assert leaving[victim] == min(leaving.values())
            if not self.copies:
                tiers.vacate(victim)
        return True

    @invariant()
    def slots_are_not_double_booked(self) -> None:
        taken = Counter(adapter for adapter in self.tiers.slots if adapter is not None)
        assert all(count == 1 for count in taken.values())
        assert taken.keys() <= self.tiers.entries.keys()

    @invariant()
    def the_budget_is_kept(self) -> None:
        assert self.tiers.used_bytes <= self.tiers.budget_bytes
        assert self.tiers.used_bytes == sum(self.sizes.values())
        reserved = sum(self.reserved.values())
        assert self.tiers.free_bytes == self.tiers.budget_bytes - self.tiers.used_bytes - reserved

    @invariant()
    def what_is_held_is_there(self) -> None:
        assert {adapter for adapter, _ in self.held} <= self.tiers.entries.keys() == self.sizes.keys()

    @invariant()
    def the_device_is_not_overbooked(self) -> None:
        assert self.tiers.device <= self.sizes.keys()
        assert self.taken(self.tiers.device) <= self.room
        used = {adapter for adapter in self.tiers.slots if adapter is not None}
        assert self.copies or used <= self.tiers.device
        assert all(self.tiers.on_device(adapter) for adapter in used | self.tiers.device)

    @invariant()
    def one_slot_is_left_unpinned(self) -> None:
        assert len(self.pinned) <= max(0, len(self.tiers.slots) - 1)


Machine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestTiers = Machine.TestCase


@pytest.fixture
def tiers() -> Tiers:
    """Two slots, room for three adapters of 10."""
    found = Tiers(2, 30)
    for adapter in (1, 2, 3):
        found.admit(adapter, 10)
        found.entries[adapter].users.add("api")
    return found


def test_the_least_recently_used_goes_first(tiers: Tiers) -> None:
    for adapter in (2, 1):
        tiers.touch(adapter)
    assert tiers.admit(4, 20) == [3, 2]
    assert tiers.counters["cpu_evictions"] == 2


def test_with_fifo_the_first_that_came_goes_first() -> None:
    """However lately it was used."""
    tiers = Tiers(2, 20, eviction="fifo")
    for adapter in (1, 2):
        tiers.admit(adapter, 10)
    tiers.touch(1)
    assert tiers.admit(3, 10) == [1]


def test_a_higher_priority_outlives_recent_use(tiers: Tiers) -> None:
    tiers.entries[1].priority = 5
    assert tiers.admit(4, 20) == [2, 3]


def test_what_does_not_fit_evicts_nobody(tiers: Tiers) -> None:
    tiers.hold(2, "api", 1)
    told = r"^21 bytes do not fit: 10 of 30 are taken, by adapters that are in use, pinned or being loaded$"
    for begin in (tiers.reserve, tiers.admit):
        with pytest.raises(NoRoom, match=told):
            begin(4, 21)
    with pytest.raises(NoRoom, match=r"^1 bytes do not fit: 30 of 30 are taken$"):
        tiers.reserve(4, 1, spare=True)
    assert tiers.entries.keys() == {1, 2, 3}


def test_a_load_that_is_only_begun_evicts_nobody(tiers: Tiers) -> None:
    tiers.reserve(4, 20)
    assert tiers.entries.keys() == {1, 2, 3}
    with pytest.raises(NoRoom):
        tiers.reserve(5, 20)
    tiers.cancel(4)
    tiers.reserve(5, 20)


def test_what_came_to_be_wanted_during_a_load_stays(tiers: Tiers) -> None:
    tiers.reserve(4, 30)
    tiers.hold(2, "api", 1)
    with pytest.raises(NoRoom):
        tiers.admit(4, 30)
    assert tiers.entries.keys() == {1, 2, 3}


@pytest.mark.parametrize("size", [5, 31])
def test_what_a_load_reserved_is_its_own_until_it_ends(size: int) -> None:
    """A step that reads the adapter meanwhile takes room of its own, or finds none."""
    tiers = Tiers(2, 30)
    tiers.reserve(4, 10)
    with nullcontext() if size == 5 else pytest.raises(NoRoom):
        tiers.admit(4, size, needed=True)
    assert tiers.free_bytes == 20 - tiers.used_bytes
    tiers.cancel(4)
    assert tiers.free_bytes == 30 - tiers.used_bytes


def test_a_hold_that_overtook_a_sync_stands(tiers: Tiers) -> None:
    tiers.hold(1, "api", 7)
    tiers.keep_holds("api", [], 6)
    assert tiers.entries[1].holders == {"api": 7}
    tiers.keep_holds("api", [], 8)
    assert tiers.entries[1].holders == {}


def test_a_step_without_announcement_protects_its_adapters() -> None:
    """As in offline use, where nobody holds anything."""
    tiers = Tiers(1, 10)
    tiers.admit(1, 10)
    tiers.begin_step([1])
    with pytest.raises(NoRoom):
        tiers.reserve(2, 1)
    tiers.begin_step([])
    assert tiers.admit(2, 1) == [1]


@pytest.mark.parametrize("change", ["replaced", "removed", "held"])
def test_only_the_next_step_ends_what_a_step_needs(tiers: Tiers, change: str) -> None:
    """A load within the step, or a call after it, leaves the adapter its slot."""
    tiers.begin_step([1, 2])
    match change:
        case "replaced":
            tiers.admit(1, 10)
        case "removed":
            tiers.remove(1)
            tiers.admit(1, 10)
        case _:
            tiers.hold(1, "api", 1)
    for adapter in (1, 2):
        tiers.place(adapter)
    with pytest.raises(NoRoom, match="all 2 slots are in use by this step"):
        tiers.place(3)
    assert tiers.goes_on({1, 2}) == (change == "replaced"), "a call counts the next step as a beginning"


def test_what_a_step_loads_evicts_nobody_of_that_step(tiers: Tiers) -> None:
    """Though its users hold it no more."""
    tiers.begin_step([1, 2, 4])
    assert tiers.admit(4, 10, needed=True) == [3]
    tiers.begin_step([])
    assert tiers.admit(5, 10) == [1]


def test_a_pinned_adapter_leaves_its_slot_last(tiers: Tiers) -> None:
    tiers.pin(1)
    for batch in ([1], [2], [3]):
        tiers.begin_step(batch)
        tiers.place(batch[0])
    assert tiers.slots == [1, 3]
    tiers.begin_step([2, 3])
    assert tiers.place(2) == (0, 1)


def test_one_slot_stays_free_of_pins(tiers: Tiers) -> None:
    tiers.pin(1)
    with pytest.raises(NoRoom, match="one of 2 slots"):
        tiers.pin(2)
    tiers.pin(1)  # again is fine


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_of_equals_the_same_stays_pinned(tiers: Tiers, order: tuple[int, ...]) -> None:
    """Each API server names its adapters in the order in which it loaded them."""
    tiers.prefer(dict.fromkeys(order, (0, True)))
    assert [adapter for adapter, entry in tiers.entries.items() if entry.pinned] == [1]


def test_many_pinned_adapters_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each ``sync``: 2,000 of them took 80 ms, in which no step ran."""
    tiers, counts = Tiers(4, 100), list[int]()
    for adapter in range(1, 33):
        tiers.admit(adapter, 1)
    pins_left = tiers._pins_left

    def counted() -> int:
        counts.append(pins_left())
        return counts[-1]

    monkeypatch.setattr(tiers, "_pins_left", counted)
    for _ in range(2):
        tiers.prefer({adapter: (adapter % 7, True) for adapter in tiers.entries})
    assert [one for one, entry in tiers.entries.items() if entry.pinned] == [6, 13, 20]
    assert counts == [3, 3]


def test_hits_and_misses_are_counted_once_a_batch(tiers: Tiers) -> None:
    for _ in range(3):
        tiers.begin_step([1])
        tiers.place(1)
    tiers.begin_step([])
    tiers.begin_step([1])
    assert (tiers.counters["gpu_misses"], tiers.counters["gpu_hits"]) == (1, 1)
    tiers.hold(1, "api", 1)  # it comes back to an engine that stood still meanwhile
    tiers.begin_step([1])
    assert tiers.counters["gpu_hits"] == 2
    tiers.hold(99, "api", 2)
    tiers.hold(98, "api", 3)
    assert (tiers.counters["cpu_misses"], tiers.counters["cpu_hits"]) == (2, 1)


def test_an_adapter_goes_when_its_last_user_drops_it(tiers: Tiers) -> None:
    tiers.entries[1].users.add("other")
    assert not tiers.drop(1, "api")
    assert tiers.drop(1, "other")


def test_what_is_not_there_needs_no_drop(tiers: Tiers) -> None:
    """A user may give up what was evicted meanwhile, or never came: there is nothing to remove."""
    assert not tiers.drop(99, "api")


def test_a_removal_leaves_a_load_under_way_its_room(tiers: Tiers) -> None:
    """As one of vLLM's own calls: the load goes on, and its end gives the room back."""
    tiers.remove(3)
    tiers.reserve(4, 10)
    tiers.remove(4)
    assert tiers.free_bytes == 0


def test_what_is_free_counts_loads_under_way(tiers: Tiers) -> None:
    """As if each that was begun had ended with all that it reserved."""
    tiers.remove(3)
    assert tiers.free_bytes == 10
    tiers.reserve(4, 4)
    assert tiers.free_bytes == 6
    tiers.cancel(4)
    assert tiers.free_bytes == 10
