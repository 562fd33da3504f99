"""The registry itself on real filesystems, two mounts each: followed across them, nothing lost."""

from __future__ import annotations

import pytest

from lora_fs.sidecar.registry.view.view import LAG_LOOK_MOST_S
from tests.filesystems import acts, serve
from tests.filesystems.acts import Seen
from tests.filesystems.rigs import Mounted

PROMPT_S = 2.5  # of a few commands' calls and a second of attributes, on a machine that is busy
CACHED_S = {("sshfs", "plain"): 20.0, ("sshfs", "lagging"): float(serve.LAG_S)}
SLOW = {("sshfs", "plain")}  # every change waits for the cache: long mode
WRITERS = {"s3fs": (1, 2)}  # on each mount, and names of each: a write there takes half a second
USUAL = (2, 3)


def bound_s(name: str, flavour: str) -> float:
    """Seconds after a command within which its change is followed: the cache of names, and a look."""
    cached_s = CACHED_S.get((name, flavour))
    return PROMPT_S if cached_s is None else cached_s + LAG_LOOK_MOST_S + PROMPT_S


def quick_flavours(volume: Mounted) -> list[str]:
    return [flavour for flavour in serve.FLAVOURS[volume.name] if (volume.name, flavour) not in SLOW]


def follow(volume: Mounted, flavour: str) -> Seen:
    here, there = volume.pair(flavour)
    local = volume.folder / f"follow-{flavour}"
    return volume.run(acts.one_registers_the_other_sees, here / "follow", there / "follow", local)


def test_what_one_mount_registers_the_other_follows(volume: Mounted) -> None:
    """Registered, moved to another revision and withdrawn: each is followed within the filesystem's bound."""
    for flavour in quick_flavours(volume):
        seen = follow(volume, flavour)
        print(volume.name, flavour, seen)
        bound = bound_s(volume.name, flavour)
        assert max(seen.registered_s, seen.promoted_s, seen.unregistered_s) < bound, (flavour, seen)


@pytest.mark.long
@pytest.mark.parametrize("volume", ["sshfs"], indirect=True)
def test_a_listing_that_is_kept_for_long(volume: Mounted) -> None:
    """sshfs as it comes keeps a listing for 20 s, and what HEAD announced is followed soon after."""
    seen = follow(volume, "plain")
    print(volume.name, "plain", seen)
    assert max(seen.registered_s, seen.promoted_s, seen.unregistered_s) < bound_s("sshfs", "plain")


def test_nothing_to_change_is_told_of_what_is_now(volume: Mounted) -> None:
    """What a client kept a listing of, and another has changed since, is changed back, not left."""
    for flavour in serve.FLAVOURS[volume.name]:
        here, there = volume.pair(flavour)
        local = volume.folder / f"mind-{flavour}"
        away, back = volume.run(acts.one_changes_its_mind, here / "mind", there / "mind", local)
        assert (back.revision, back.generation) == ("v2", away.generation + 1), flavour


def test_concurrent_registrations_from_both_mounts(volume: Mounted) -> None:
    """All are acknowledged, both mounts end with all of them and no other, each with an id of its own."""
    writers, each = WRITERS.get(volume.name, USUAL)
    for flavour in quick_flavours(volume):
        here, there = volume.pair(flavour)
        local = volume.folder / f"crowd-{flavour}"
        crowd = volume.run(acts.many_register, here / "crowd", there / "crowd", local, writers, each)
        assert crowd.refused == {}, flavour
        assert len(crowd.acknowledged) == 2 * writers * each * 2
        assert crowd.seen == (crowd.acknowledged, crowd.acknowledged), flavour
        assert len(set(crowd.acknowledged.values())) == len(crowd.acknowledged)
        assert crowd.shared[0] == crowd.shared[1] != "", flavour


def test_removed_history_misleads_nobody_on_the_other_mount(volume: Mounted) -> None:
    """Who missed a withdrawal learns of it, a writer that slept is refused, and the name comes back."""
    for flavour in quick_flavours(volume):
        here, there = volume.pair(flavour)
        local = volume.folder / f"compact-{flavour}"
        found = volume.run(acts.one_compacts_the_other_slept, here / "compact", there / "compact", local)
        assert found.files == 2, flavour
        assert found.slept == {"kept": "v1"}, flavour
        assert found.back == ({"kept": "v1", "gone": "v1"},) * 2, flavour
        assert found.refused, flavour
        assert found.generations == [3], flavour
