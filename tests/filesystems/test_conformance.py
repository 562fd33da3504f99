"""What the conformance suite finds on real filesystems: the table of docs/reliability.md, tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_fs.sidecar.conformance import FULL, QUICK, Verdict, examine
from lora_fs.sidecar.registry.volume.mounts import timing_for
from tests.filesystems.rigs import Mounted

KIND = {
    "tmpfs": "tmpfs",
    "glusterfs": "fuse.glusterfs",
    "sshfs": "fuse.sshfs",
    "s3fs": "fuse.s3fs",
    "nfs": "nfs4",
}
NO_LINK = {"s3fs"}
NOTIFIES = {"tmpfs"}
WHOLE = {"tmpfs", "glusterfs"}
SHOWS_LATE = {  # what is not shown within 0.25 s by mounts as they come
    "tmpfs": set[str](),
    "glusterfs": {"replace", "delete", "registered"},
    "sshfs": {"listing", "stat", "registered"},
    "s3fs": {"stat"},
    "nfs": {"create-asked", "delete", "stat", "registered"},  # attributes are kept for 3 s and longer
}
PROMPT_S = 0.25
QUICK_S = 60.0  # about 10 where nobody else is at work


def names(folder: Path) -> list[str]:
    return os.listdir(folder)


def late(verdict: Verdict) -> set[str]:
    return {delay.name for delay in verdict.delays if delay.usual_s > PROMPT_S}


def asks_to_mount(verdict: Verdict) -> bool:
    return any(line.startswith("Mount") for line in verdict.advice)


def test_the_filesystem_is_recognised(volume: Mounted, verdict: Verdict) -> None:
    """Both mounts are told as what the kernel calls them."""
    assert verdict.kinds == (KIND[volume.name],) * 2


def test_one_winner_and_fencing_hold_where_there_are_links(volume: Mounted, verdict: Verdict) -> None:
    """A name has one winner and a writer that slept is refused, or the tier says that it is not so."""
    expected = volume.name not in NO_LINK
    assert (verdict.ok, verdict.tier) == (expected, "cas" if expected else "lww")
    assert verdict.promise("one-winner").holds is expected
    assert verdict.promise("fencing").holds is expected
    assert expected or "no registry here that two writers" in verdict.advice[0]


def test_only_a_local_filesystem_wakes_a_watcher(volume: Mounted, verdict: Verdict) -> None:
    """Of the other mount's changes inotify tells there and nowhere else."""
    assert verdict.promise("notifies").holds is (volume.name in NOTIFIES)


def test_replaced_files_are_read_whole(volume: Mounted, verdict: Verdict) -> None:
    """No half file on filesystems that replace in one step; on others the verdict counts them."""
    reads = verdict.promise("whole-reads")
    assert reads.holds or volume.name not in WHOLE, reads.text


def test_what_shows_late_is_what_is_known_to(volume: Mounted, verdict: Verdict) -> None:
    """What it usually shows later than a quarter of a second is what this filesystem is known for."""
    assert late(verdict) <= SHOWS_LATE[volume.name]


def test_the_times_to_set_follow_from_the_delays(volume: Mounted, verdict: Verdict) -> None:
    """HEAD is not read more often than it changes for a reader; no copy under way looks still."""
    usual = timing_for(KIND[volume.name])
    assert verdict.poll_s >= usual.poll_s
    assert verdict.settle_s >= usual.settle_s
    assert verdict.settle_s >= 2 * verdict.delay("stat").bound_s - PROMPT_S


def test_it_ends_in_time(verdict: Verdict) -> None:
    """The quick suite takes seconds, whatever lags."""
    assert verdict.quick
    assert verdict.took_s < QUICK_S


def test_nothing_is_left(volume: Mounted, verdict: Verdict) -> None:
    """The scratch folder is gone from both mounts."""
    assert verdict.took_s > 0
    for mount in volume.pair():
        assert not [name for name in volume.run(names, mount) if "doctor" in name]


@pytest.mark.parametrize("volume", ["nfs"], indirect=True)
def test_its_advice_for_nfs(volume: Mounted, verdict: Verdict) -> None:
    """It asks for the option that shows a name which was asked for too early, and with it that shows."""
    assert verdict.delay("create-asked").unseen
    assert any("lookupcache=positive" in line for line in verdict.advice)
    tuned = volume.run(examine, *volume.pair("tuned"), QUICK)
    assert tuned.delay("create-asked").unseen == 0


@pytest.mark.parametrize("volume", ["glusterfs", "sshfs"], indirect=True)
def test_its_advice_is_right(volume: Mounted, verdict: Verdict) -> None:
    """With the mount options that it names nothing shows late, and it has nothing more to say of them."""
    assert late(verdict)
    assert asks_to_mount(verdict)
    tuned = volume.run(examine, *volume.pair("tuned"), QUICK)
    assert late(tuned) == set()
    assert not asks_to_mount(tuned)


@pytest.mark.long
def test_the_full_suite(volume: Mounted) -> None:
    """Minutes of it find what seconds of it found."""
    verdict = volume.run(examine, *volume.pair(), FULL)
    print(verdict.model_dump_json(indent=1))
    assert verdict.ok is (volume.name not in NO_LINK)
    assert all(delay.unseen == 0 for delay in verdict.delays)
