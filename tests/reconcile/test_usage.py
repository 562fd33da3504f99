"""What is counted of each revision: requests, errors and loads, bounded, and forgotten with the revision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import EngineRejected
from lora_fs.sidecar.model import AdapterKey, Canary, RevisionUsage
from lora_fs.sidecar.reconcile.telemetry import usage
from lora_fs.sidecar.reconcile.telemetry.usage import UsageCounters
from tests.reconcile.conftest import Rig

MakeRig = Callable[..., Rig]
anyio = pytest.mark.anyio


def key(name: str, revision: str = "v1") -> AdapterKey:
    return AdapterKey("default", "tiny", revision, name)


def asked(counters: UsageCounters, names: Iterable[str]) -> None:
    for name in names:
        counters.asked(key(name))


@pytest.mark.parametrize(
    ("status", "errors"),
    [(200, (0, 0)), (302, (0, 0)), (400, (1, 0)), (404, (1, 0)), (499, (0, 0)), (503, (0, 1))],
)
def test_errors_are_counted_by_the_class_of_their_status(status: int, errors: tuple[int, int]) -> None:
    """An answer of 4xx or 5xx is an error; a client that left before the answer is none."""
    counters = UsageCounters()
    counters.asked(key("a"))
    counters.answered(key("a"), status)
    found = counters.report().revisions[key("a")]
    assert (found.requests, found.errors_4xx, found.errors_5xx) == (1, *errors)


def test_each_report_has_the_counts_of_its_time() -> None:
    """A later count changes the next report, and not the one before it."""
    counters = UsageCounters()
    acts: list[Callable[[], None]] = [
        partial(counters.asked, key("a")),
        partial(counters.answered, key("a"), 503),
        partial(counters.loaded, key("a"), 2.0),
    ]
    for count in acts:
        before = counters.report([key("a")]).revisions[key("a")]
        copied = before.model_copy()
        count()
        after = counters.report([key("a")]).revisions[key("a")]
        assert (before, after == before) == (copied, False)
    assert (after.requests, after.errors_5xx, after.loads, after.load_seconds) == (1, 1, 1, 2.0)


def test_the_most_requested_are_reported() -> None:
    """A report has the canaries first, were their counts 0, then the most requested; it counts the rest."""
    counters = UsageCounters()
    asked(counters, "abbccc")
    report = counters.report([key("tried"), key("a")], most=3)
    assert [(one.name, counts.requests) for one, counts in report.revisions.items()] == [
        ("tried", 0),
        ("a", 1),
        ("c", 3),
    ]
    assert report.left_out == 1
    assert [*counters.report(map(key, "xyz"), most=2).revisions] == [key("x"), key("y")]


def test_a_pass_looks_at_what_was_counted_since_the_last_one() -> None:
    """A revision that the next pass keeps costs no later one anything."""
    counters, looked = UsageCounters(), list[AdapterKey]()

    def is_served(one: AdapterKey) -> bool:
        looked.append(one)
        return True

    asked(counters, "a")
    counters.keep_only(is_served, ())
    counters.keep_only(is_served, ())
    assert looked == [key("a")]


@given(st.lists(st.sampled_from("abcdefgh"), max_size=60))
def test_the_counters_are_bounded(names: list[str]) -> None:
    """Of more revisions than are kept, the one that was used longest ago is forgotten first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(usage, "KEPT", 3)
        counters = UsageCounters()
        asked(counters, names)
    lately = list(dict.fromkeys(reversed(names)))[:3]
    report = counters.report()
    assert {one.name for one in report.revisions} == set(lately)
    assert report.left_out == 0


@anyio
async def test_loads_are_counted_by_revision(make_rig: MakeRig) -> None:
    """Each load that succeeds adds its seconds; one that fails adds none."""
    rig = make_rig()
    record = rig.volume.put("a")
    rig.engine.refuses["b-v1"] = EngineRejected("no", reason="no")
    rig.volume.put("b")
    async with rig.replica.hold("a", 5):
        pass
    with pytest.raises(EngineRejected):
        async with rig.replica.hold("b", 5):
            pass
    assert rig.replica.usage().revisions == {record.key: RevisionUsage(loads=1)}


@anyio
async def test_a_revision_that_goes_takes_its_counts_along(make_rig: MakeRig) -> None:
    """A thousand revisions that were asked for and unregistered leave no counter, whenever they went."""
    rig = make_rig()
    for number in range(1000):
        name = f"a{number}"
        rig.volume.put(name)
        if number % 2:  # the replica may not have looked between the request and the removal
            await rig.replica.reconcile()
        served = rig.replica.lookup(name)
        assert served is not None
        rig.replica.choose(served, None)
        rig.volume.remove(name)
        await rig.replica.reconcile()
    assert rig.replica.usage() == ({}, 0)


@anyio
async def test_both_sides_of_a_canary_are_counted_from_the_start(make_rig: MakeRig) -> None:
    """Each side is reported with 0 before its first request, since an increase needs a first value."""
    rig = make_rig()
    rig.volume.put("a", "v2")
    first = rig.volume.put("a", "v1")
    rig.volume.point("a", "v1", Canary(revision="v2", percent=20))
    await rig.settle()
    none = RevisionUsage()
    assert rig.replica.usage().revisions == {first.key: none, first.key._replace(revision="v2"): none}
