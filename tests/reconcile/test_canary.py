"""Who is asked by a canary: the same on every replica, and never taken back while its share grows."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.model import Canary, Policy, PolicyKind, Record, public_of
from lora_fs.sidecar.reconcile.catalog import Catalog, Served, Trial, place
from tests.reconcile.conftest import SCOPE, Rig
from tests.reconcile.test_plan import RECORD

MakeRig = Callable[..., Rig]
V2 = RECORD.model_copy(update={"revision": "v2"})
STABLE = Served("a1", RECORD)
users = st.text(min_size=1)
percents = st.integers(0, 100)
anyio = pytest.mark.anyio


def tried(percent: int) -> Catalog:
    return Catalog(served={"a1": STABLE}, trials={"a1": Trial(Served("a1@v2", V2), percent)})


def no_chance() -> float:
    raise AssertionError("who asks is known: nothing is drawn")


@given(users, percents, percents)
def test_a_share_that_grows_takes_nobody_back(user: str, low: int, high: int) -> None:
    """Whom the canary answers at one percentage it answers at every greater one."""
    low, high = sorted((low, high))
    if tried(low).choose(STABLE, user, no_chance) is not STABLE:
        assert tried(high).choose(STABLE, user, no_chance) is not STABLE


@given(users)
def test_the_ends(user: str) -> None:
    """0 % is nobody, 100 % everybody."""
    assert tried(0).choose(STABLE, user, no_chance) is STABLE
    assert tried(100).choose(STABLE, user, no_chance).record is V2


@given(users, percents)
def test_the_revision_has_no_say(user: str, percent: int) -> None:
    """Where a user stands does not change with the revision that serves, nor with its generation."""
    promoted = Served("a1", V2.model_copy(update={"generation": 7}))
    assert place(RECORD, user) == place(promoted.record, user)


@pytest.mark.parametrize("percent", [1, 5, 50, 95])
def test_the_share_is_kept_to(percent: int) -> None:
    """Of 20,000 users, and of as many requests of unknown users, within 1 % of all."""
    catalog, chance = tried(percent), random.Random(0)
    asked = [*(str(number) for number in range(20_000)), *[None] * 20_000]
    answered = [catalog.choose(STABLE, user, chance.random).record is V2 for user in asked]
    assert sum(answered[:20_000]) / 200 == pytest.approx(percent, abs=1)
    assert sum(answered[20_000:]) / 200 == pytest.approx(percent, abs=1)


def test_two_names_try_it_on_other_users() -> None:
    """A user is not the first to be asked by every canary there is."""
    other = RECORD.model_copy(update={"name": "a2"})
    crowd = [str(number) for number in range(1_000)]
    first = {user for user in crowd if place(RECORD, user) < 10}
    second = {user for user in crowd if place(other, user) < 10}
    assert 0 < len(first & second) < 40


def test_another_process_agrees() -> None:
    """Nothing of the process is in it, its seed for hashes least of all."""
    crowd = [*(str(number) for number in range(50)), "é", "\u2028"]
    code = (
        "import json,sys;from tests.reconcile.test_plan import RECORD;"
        "from lora_fs.sidecar.reconcile.catalog import place;"
        "print(json.dumps([place(RECORD, user) for user in json.loads(sys.argv[1])]))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, json.dumps(crowd)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ".", "PYTHONHASHSEED": "7"},
    )
    assert json.loads(told.stdout) == [place(RECORD, user) for user in crowd]


# -- on a replica --------------------------------------------------------------------------------


def trial(rig: Rig, policy: Policy | None = None, percent: int = 20) -> tuple[Record, Record]:
    """``a`` serves v1 and tries v2, which has no policy of its own."""
    second = rig.volume.put("a", "v2")
    first = rig.volume.put("a", "v1", policy)
    rig.volume.point("a", "v1", Canary(revision="v2", percent=percent))
    return first, second


@anyio
@pytest.mark.parametrize("kind", [PolicyKind.EAGER, PolicyKind.PINNED])
async def test_it_is_loaded_before_it_is_asked(make_rig: MakeRig, kind: PolicyKind) -> None:
    """As the revision beside it is, in the place of a name of its own, and it stays while it is tried."""
    rig = make_rig(max_loaded=4)
    trial(rig, Policy(kind=kind))
    await rig.settle()
    assert rig.engine.public() == {"a", "a@v2"}
    rig.clock.now += 10_000
    await rig.settle()
    assert rig.engine.public() == {"a", "a@v2"}
    told, _ = rig.replica.notable()
    assert told.keys() == {"a", "a@v2"}
    policies = {public_of(name): policy.kind for name, policy in rig.engine.policies.items()}
    assert policies == {"a": kind, "a@v2": kind}


@anyio
async def test_a_lazy_one_is_loaded_when_it_is_asked(make_rig: MakeRig) -> None:
    """Under the name of its revision, beside the other, and is unloaded idle."""
    rig = make_rig()
    first, second = trial(rig, percent=100)
    await rig.settle()
    assert rig.engine.adapters == {}
    served = rig.replica.lookup("a")
    assert served is not None
    chosen = rig.replica.choose(served, "somebody")
    async with rig.replica.hold(chosen.name, 5) as name:
        assert public_of(name) == "a@v2"
    assert (chosen.record, served.record) == (second, first)
    counted = {key.revision: used.requests for key, used in rig.replica.usage().revisions.items()}
    assert counted == {"v1": 0, "v2": 1}
    rig.clock.now += 61
    await rig.settle()
    assert rig.engine.adapters == {}


@anyio
async def test_it_is_finished_without_a_load(make_rig: MakeRig) -> None:
    """The copy that was tried goes on under the plain name; the other one leaves."""
    rig = make_rig()
    trial(rig, Policy(kind=PolicyKind.STICKY), percent=100)
    for name in ("a", "a@v2"):
        async with rig.replica.hold(name, 5):
            pass
    loads = list(rig.engine.loads)
    rig.volume.point("a", "v2")
    async with rig.replica.hold("a", 5) as name:
        assert public_of(name) == "a@v2"
    await rig.settle()
    assert rig.engine.loads == loads
    assert rig.engine.public() == {"a@v2"}


@anyio
async def test_what_is_not_registered_answers_nobody(make_rig: MakeRig) -> None:
    """A canary whose revision is withdrawn, or is the one that serves, has no share."""
    rig = make_rig()
    rig.volume.put("a", "v1")
    for revision in ("v1", "v3"):
        rig.volume.point("a", "v1", Canary(revision=revision, percent=100))
        served = rig.replica.lookup("a")
        assert served is not None
        assert rig.replica.choose(served, "somebody") is served
    assert rig.replica.catalog().trials == {}


@anyio
async def test_a_revision_that_is_asked_for_answers(make_rig: MakeRig) -> None:
    """``a@v1`` is v1, whatever share another one has."""
    rig = make_rig()
    first, _ = trial(rig, percent=100)
    served = rig.replica.lookup("a@v1")
    assert served is not None
    assert rig.replica.choose(served, "somebody").record is first
    assert first.key.scope == SCOPE
