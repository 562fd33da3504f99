"""--wait, status, doctor and gc: what the command line makes of replicas' reports."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.cli.backends.volume import OnVolume
from lora_fs.sidecar.cli.options import waiting
from lora_fs.sidecar.cli.volume import gc
from lora_fs.sidecar.model import Phase, ReplicaStatus
from lora_fs.sidecar.model.status import RECENT
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.view import reports
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.registry.volume.atomic import unavailable
from lora_fs.sidecar.registry.volume.leases import lease
from tests.cli.conftest import LoraFs, seen
from tests.registry.faults import fail
from tests.registry.test_lock import left_by_another_host

Folder = Callable[[int], str]
Report = Callable[..., None]


def test_no_replica_to_wait_for(lora_fs: LoraFs, folder: Folder) -> None:
    """A wait fails where no live replica is there, unless none is needed; what was written stays."""
    ran = lora_fs("register", "a", folder(1), "--wait", "100ms")
    assert ran.code == 6
    assert "0 of default/tiny are live, 1 are needed" in ran.err
    assert lora_fs("list", "-o", "name").out == "a\n"
    ran = lora_fs("register", "a", folder(1), "--wait", "5", "--min-replicas", "0")
    assert ran.code == 0
    assert "no live replica" in ran.err
    assert lora_fs("register", "b", folder(2), "--wait", "100ms", "--dry-run").code == 0


def test_a_replica_that_follows(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The command ends when the last one has seen it, and stale or foreign ones are not waited for."""
    lora_fs("register", "other", folder(0))
    report("old", age_s=3600)
    report("elsewhere", namespaces=("team-b",))
    report("quick", recent=seen())
    report("slow")
    followed = threading.Event()

    def follow() -> None:
        followed.set()  # before the report: once it can be read, the command may end at any moment
        report("slow", recent=seen())

    threading.Timer(0.3, follow).start()
    assert lora_fs("register", "a", folder(1), "--wait", "20").code == 0
    assert followed.is_set()


def test_a_replica_that_lags(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """Exit 6, and it is named; what was written is told on stdout all the same."""
    report("quick", recent=seen())
    report("slow")
    ran = lora_fs("register", "a", folder(1), "--wait", "0.2", "-o", "json")
    assert ran.code == 6
    assert ran.json["record"]["revision"] == "v1"
    assert "slow" in ran.err
    assert "quick" not in ran.err


def test_what_a_short_report_does_not_have_was_not_seen(
    lora_fs: LoraFs, folder: Folder, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it was written: the replica tells of all that it saw, until that is too much."""
    monkeypatch.setattr(waiting, "FORGOTTEN_S", -1.0)  # as if all had been written long ago
    others = {f"default/tiny/v1/b{n}": 1 for n in range(RECENT)}
    some = dict(list(others.items())[1:])
    report("blind", recent=some)
    commands = (("register", "a", folder(1), "--wait", "0"), ("wait", "a", "--timeout", "0"))
    for words in commands:
        ran = lora_fs(*words)
        assert (ran.code, "blind" in ran.err) == (6, True), ran.err
    assert tuple(lora_fs("status").out.splitlines()[1].split()[:4]) == ("a", "v1", "blind", "-")
    assert "has not seen it yet" in lora_fs("status").out
    (row,) = lora_fs("status", "-o", "json").json["adapters"]
    assert (row["replica"], row["phase"]) == ("blind", None)
    report("blind", recent=others)  # it told of more since, perhaps
    for words in commands:
        assert lora_fs(*words).code == 0
    assert lora_fs("status").out.splitlines()[1].split()[3] == "Unloaded"


@pytest.mark.parametrize("what", ["the record", "its folder", "the pointer"])
def test_a_replica_that_may_not_read_what_was_written(
    lora_fs: LoraFs, folder: Folder, report: Report, what: str
) -> None:
    """It says so itself, wherever it mounts the volume, and so does who waits for it."""
    lora_fs("register", "a", folder(1))
    at = {"the record": "v1/a.@00000001.json", "its folder": "v1", "the pointer": ".active/a.@00000001.json"}
    path = f"/mnt/of-the-pod/default/tiny/{at[what]}"
    did = "cannot list" if what == "its folder" else "cannot open"
    mine = f"Unreadable: {unavailable(PermissionError(errno.EACCES, ''), f'{did} {path}')}"
    others = f"Unreadable: {mine}".replace("a.@", "b.@").replace("v1:", "v12:")
    half = seen(record=0) if what != "the pointer" else seen(pointer=0)
    report("pod-a", recent=half, conditions=("VolumeStalled: slow", others, mine))
    for words in (("wait", "a", "--timeout", "0"), ("register", "a", folder(1), "--wait", "0")):
        ran = lora_fs(*words)
        assert (ran.code, f"({mine})" in ran.err) == (6, True), ran.err
    report("pod-a", recent=half, conditions=(others,))
    assert "Unreadable" not in lora_fs("wait", "a", "--timeout", "0").err


def test_the_record_alone_is_not_enough(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The plain name serves it only where the pointer was seen, too."""
    report("half", recent=seen(pointer=0))
    assert lora_fs("register", "a", folder(1), "--wait", "0").code == 6
    assert lora_fs("register", "a", folder(1), "--wait", "0", "--no-activate").code == 0


@pytest.mark.parametrize("namespaces", [("default",), ("default", "team-b")])
def test_a_replica_that_cannot_load_it(
    lora_fs: LoraFs, folder: Folder, report: Report, namespaces: tuple[str, ...]
) -> None:
    """Exit 1 with its reason, also where it serves several tenants."""
    name = "a" if len(namespaces) == 1 else "default/a"
    report("bad", recent=seen(), phases={name: Phase.FAILED}, namespaces=namespaces)
    ran = lora_fs("register", "a", folder(1), "--wait", "5")
    assert ran.code == 1
    assert "bad cannot load a: Failed it is" in ran.err


def test_an_old_failure_is_not_the_new_ones(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A replica that failed on v1 and has not seen v2 lags; once it has, v1 says nothing of v2."""
    lora_fs("register", "a", folder(1))
    report("r", recent=seen(), phases={"a": Phase.FAILED})
    assert lora_fs("register", "a", folder(2), "--wait", "0").code == 6
    report("r", recent=seen(revision="v2", pointer=2), phases={"a": Phase.FAILED})
    assert lora_fs("register", "a", folder(2), "--wait", "0").code == 0


def test_an_adapter_that_is_being_loaded(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """It is waited for, so that a failure at its end is told."""
    report("r", recent=seen(), phases={"a": Phase.LOADING})
    ran = lora_fs("register", "a", folder(1), "--policy", "eager", "--wait", "0")
    assert ran.code == 6
    assert "r (Loading)" in ran.err
    follow = threading.Timer(0.2, report, ("r",), {"recent": seen(), "phases": {"a": Phase.FAILED}})
    follow.start()
    assert lora_fs("promote", "a", "v1", "--wait", "20").code == 1


def test_promote_and_rollback_wait(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """Both wait for the pointer."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    report("r", recent=seen(pointer=2))
    assert lora_fs("promote", "a", "v1", "--wait", "0").code == 6
    report("r", recent=seen(pointer=4))
    assert lora_fs("rollback", "a", "--wait", "0").code == 0


def test_unregister_waits_until_it_is_gone(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A replica that has seen the tombstone and still drains is waited for."""
    lora_fs("register", "a", folder(1))
    report("r", recent=seen(record=2), phases={"a": Phase.DRAINING})
    ran = lora_fs("unregister", "a", "--wait", "0.2")
    assert ran.code == 6
    assert "r (Draining)" in ran.err
    report("r", recent=seen(record=2))
    lora_fs("register", "a", folder(1), "--revision", "v1")
    assert lora_fs("unregister", "a", "--wait", "0").code == 6  # generation 4, seen up to 2


def test_unregister_of_a_revision_that_is_not_served(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The plain name goes on serving another revision: that is not waited for."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2))
    report("r", recent=seen(record=2), phases={"a": Phase.READY}, revision="v2")
    assert lora_fs("unregister", "a", "--revision", "v1", "--wait", "0").code == 0


def test_a_young_report_that_cannot_be_read_is_waited_for(
    lora_fs: LoraFs, folder: Folder, root: Path
) -> None:
    """Unknown is not absent; one that is old is left out as any stale one is."""
    lora_fs("register", "other", folder(0))
    torn = root / ".replicas" / "torn.json"
    torn.write_text("{")
    ran = lora_fs("register", "a", folder(1), "--wait", "0")
    assert ran.code == 6
    assert "torn (its report cannot be read)" in ran.err
    age(torn)
    assert lora_fs("register", "a", folder(1), "--wait", "0", "--min-replicas", "0").code == 0


def test_a_volume_that_does_not_answer_for_a_moment(
    lora_fs: LoraFs, folder: Folder, report: Report, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked again while there is time; unknown replicas are not followers."""
    report("r", recent=seen())
    lora_fs("register", "other", folder(0))
    of_reports = str(root / ".replicas")
    with monkeypatch.context() as patch:
        asked = fail(patch, "listdir", errno.EIO, times=2, when=lambda path: str(path) == of_reports)
        assert lora_fs("register", "a", folder(1), "--wait", "20").code == 0
        assert len([path for (path,) in asked if str(path) == of_reports]) == 3
    fail(monkeypatch, "listdir", errno.EIO, times=1 << 30, when=lambda path: str(path) == of_reports)
    ran = lora_fs("register", "a", folder(1), "--wait", "0.1")
    assert ran.code == 6
    assert "reports cannot be read" in ran.err


def test_a_volume_that_is_gone_while_waiting(
    lora_fs: LoraFs, folder: Folder, report: Report, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty mount is not a registry without replicas."""
    report("slow")
    lora_fs("register", "a", folder(1))

    read_reports = reports.read_reports

    def read_and_unmount(layout: Layout) -> reports.Reports:
        told = read_reports(layout)
        if root.exists():
            root.rename(root.with_name("elsewhere"))
        return told

    monkeypatch.setattr(reports, "read_reports", read_and_unmount)
    ran = lora_fs("promote", "a", "v1", "--wait", "0.1")
    assert ran.code == 6
    assert "is its volume still mounted?" in ran.err


def test_watching_outlasts_a_volume_that_does_not_answer(
    lora_fs: LoraFs, folder: Folder, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen last is shown on, and said to be old."""
    lora_fs("register", "a", folder(1))
    report("r", phases={"a": Phase.READY})
    with monkeypatch.context() as patch:

        def hang_up(_: float) -> None:
            patch.setattr(time, "sleep", press_ctrl_c)
            fail(patch, "listdir", errno.EIO, times=1 << 30)

        def press_ctrl_c(_: float) -> None:
            raise KeyboardInterrupt

        patch.setattr(time, "sleep", hang_up)
        ran = lora_fs("status", "--watch")
    assert ran.code == 130
    assert [line.split()[:4] for line in ran.out.splitlines()].count(["a", "v1", "r", "Ready"]) == 2
    assert ran.err.startswith("lora-fs: shown as it was before: ")


@pytest.mark.parametrize("updated_at", ["", "yesterday", "2020-01-01T00:00:00", "2999-01-01T00:00:00Z"])
def test_times_that_are_no_times(lora_fs: LoraFs, folder: Folder, root: Path, updated_at: str) -> None:
    """A report that does not say when it was written is stale, and no command stumbles over it."""
    lora_fs("register", "a", folder(1))
    status = ReplicaStatus(replica="r", model="tiny", namespaces=("default",), updated_at=updated_at)
    (root / ".replicas" / "r.json").write_bytes(seal(status))
    ran = lora_fs("status")
    assert ran.code == 0
    assert ("stale" in ran.out) is not updated_at.startswith("2999")
    assert lora_fs("status", "-o", "json").code == 0
    assert lora_fs("doctor").code in (0, 1)
    assert lora_fs("register", "b", folder(2), "--wait", "0").code in (0, 6)


def test_status(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A row for each adapter on each replica; conditions and stale reports stand out."""
    lora_fs("register", "a", folder(1))
    assert "no replica has reported" in lora_fs("status").out
    report("one", phases={"a": Phase.READY})
    report("two", recent=seen(), age_s=300, conditions=("VolumeUnavailable: read-only",))
    rows = {tuple(line.split()[:4]): line for line in lora_fs("status").out.splitlines()}
    assert ("a", "v1", "one", "Ready") in rows
    assert "stale" in rows[("a", "v1", "two", "Unloaded")]
    assert any("VolumeUnavailable" in line for line in rows.values())
    told = lora_fs("status", "-o", "json").json
    assert len(told["replicas"]) == 2
    assert [(row["replica"], row["phase"], row["live"]) for row in told["adapters"]] == [
        ("one", "Ready", True),
        ("two", "Unloaded", False),
    ]
    assert "5 min ago" in lora_fs("status").out


def test_a_gateway_knows_an_adapter_by_its_public_name(
    lora_fs: LoraFs, folder: Folder, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas of several namespaces serve it under its namespace: that one's homes are asked for."""
    asked: list[str | None] = []
    monkeypatch.setattr(OnVolume, "fleet", lambda _, name: asked.append(name))
    lora_fs("register", "a", folder(1))
    for namespaces in (("default",), ("default", "team-a")):
        report("pod", namespaces=namespaces)
        lora_fs("status", "a")
    assert asked == ["a", "default/a"]


def test_status_shows_what_a_terminal_would_act_on(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A replica's words are shown escaped."""
    lora_fs("register", "a", folder(1))
    report("r", conditions=("Unreadable: \x1b[2J\r",))
    assert "\x1b" not in lora_fs("status").out


def test_status_of_what_is_no_longer_registered(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """An adapter that still drains has its row, by the name it had."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    report("r", phases={"a": Phase.DRAINING})
    assert lora_fs("status").out.splitlines()[1].split()[:4] == ["a", "v1", "r", "Draining"]


def test_one_revision(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """status and wait of NAME@R are of that revision, whether the plain name serves it or its own."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "a", folder(2), "--no-activate")
    known = seen() | {"default/tiny/v2/a": 1}
    report("r", recent=known, phases={"a": Phase.READY, "a@v2": Phase.LOADING})

    def rows(*what: str) -> list[list[str]]:
        return [line.split()[:4] for line in lora_fs("status", *what, "--no-headers").out.splitlines()]

    served, tried = ["a", "v1", "r", "Ready"], ["a@v2", "v2", "r", "Loading"]
    assert (rows("a"), rows("a@v1"), rows("a@v2")) == ([served, tried], [served], [tried])
    assert (
        lora_fs("wait", "a@v1", "--for", "condition=Loaded").out
        == "a@v1: condition=Loaded on every replica\n"
    )
    ran = lora_fs("wait", "a@v2", "--timeout", "1ms")
    assert (ran.code, "a@v2 is not ready after 0.001 s: r (Loading" in ran.err) == (6, True)
    report("r", recent=known, phases={"a": Phase.READY})
    assert rows("a@v2") == [["a@v2", "v2", "r", "Unloaded"]]
    assert lora_fs("wait", "a@v2", "-o", "name").out == "a@v2\n"
    assert lora_fs("wait", "a@v2", "--for", "condition=Loaded", "--timeout", "1ms").code == 6
    assert lora_fs("wait", "a@v2", "--for", "deleted", "--timeout", "1ms").code == 6
    assert lora_fs("unregister", "a@v2").code == 0
    assert lora_fs("wait", "a@v2", "--for", "deleted").code == 0
    assert "a@v9 is not registered" in lora_fs("wait", "a@v9").err
    assert "a@v9 is not registered" in lora_fs("status", "a@v9").err


def test_a_report_that_cannot_be_read(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """It is told as such: unknown is neither absent nor fine."""
    lora_fs("register", "a", folder(1))
    (root / ".replicas" / "torn.json").write_text("{")
    assert "torn" in lora_fs("status").out
    assert "torn" in lora_fs("doctor").out
    assert "torn" in lora_fs("status", "-o", "json").json["unreadable"]


def test_doctor(lora_fs: LoraFs, folder: Folder, report: Report, root: Path) -> None:
    """Fine is exit 0 (where a gigabyte is free); files that are gone, and stale replicas, are not."""
    lora_fs("register", "a", folder(1))
    checks = {check["text"]: check["ok"] for check in lora_fs("doctor", "-o", "json").json["checks"]}
    assert checks["of two writers of one name exactly one wins"]
    assert all(ok for text, ok in checks.items() if "GB free" not in text)
    assert not list(root.glob(".tmp-*"))
    (root / "default" / "tiny" / "v1" / "a" / "adapter_config.json").unlink()
    (root / "default" / "tiny" / "v1" / "a" / "adapter_model.safetensors").unlink()
    (root / "default" / "tiny" / "v1" / "a").rmdir()
    report("gone", age_s=3600)
    ran = lora_fs("doctor")
    assert ran.code == 1
    assert "BAD  default/tiny/v1/a: its files are gone" in ran.out
    assert "BAD  replica gone wrote" in ran.out


def age(path: Path) -> None:
    """Make a file and what is in it two days old."""
    for one in (path, *path.rglob("*")):
        os.utime(one, times=(one.stat().st_atime - 200_000, one.stat().st_mtime - 200_000))


def test_gc(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """Files of what was unregistered long ago go; a dry run only says so."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "b", folder(2))
    lora_fs("unregister", "a")
    age(root)
    files = root / "default" / "tiny" / "v1" / "a"
    assert f"would remove {files}" in lora_fs("gc", "--dry-run").out
    assert files.is_dir()
    assert str(files) in [item["path"] for item in lora_fs("gc", "-o", "json").json["removed"]]
    assert not files.exists()
    assert (root / "default" / "tiny" / "v1" / "b").is_dir()


def test_gc_with_a_report_that_cannot_be_read(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """What that replica uses is not known: no adapter's files are removed, and that is a failure."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    age(root)
    (root / ".replicas" / "torn.json").write_text("{")
    for words in (("gc",), ("gc", "--dry-run"), ("gc", "-o", "json")):
        ran = lora_fs(*words)
        assert ran.code == 1
        assert "torn" in ran.err
    assert "torn" in ran.json["kept"]
    assert (root / "default" / "tiny" / "v1" / "a").is_dir()


def test_gc_lists_what_it_may_not_remove(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the rest, says what stays and why, and exits with 1."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    stays = root / ".tmp-dead"
    stays.touch()
    age(root)
    fail(monkeypatch, "unlink", errno.EACCES, when=lambda path, *_, **__: Path(path) == stays)
    ran = lora_fs("gc", "-o", "json")
    assert ran.code == 1
    assert f"1 of 2 things were not removed:\n  - cannot remove {stays}: Permission denied" in ran.err
    assert [one["path"] for one in ran.json["refused"]] == [str(stays)]
    assert [one["path"] for one in ran.json["removed"]] == [str(root / "default" / "tiny" / "v1" / "a")]


def test_gc_leaves_what_a_replica_serves(lora_fs: LoraFs, folder: Folder, report: Report, root: Path) -> None:
    """Requests may still be under way there."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    age(root)
    report("r", phases={"a": Phase.DRAINING})
    assert lora_fs("gc").code == 0
    assert (root / "default" / "tiny" / "v1" / "a").is_dir()


def test_gc_leaves_what_is_kept(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """``--keep-files`` is for good."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a", "--keep-files")
    age(root)
    assert lora_fs("gc").code == 0
    assert (root / "default" / "tiny" / "v1" / "a").is_dir()


def test_one_gc_at_a_time(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one is told that one is at work."""
    monkeypatch.setattr(gc, "DEAD_AFTER_S", 0.1)
    lora_fs("register", "a", folder(1))
    with lease(root / ".leases" / "gc.lock", wait_s=0) as had:
        assert had
        ran = lora_fs("gc")
    assert ran.code == 1
    assert "another gc" in ran.err


def test_gc_after_one_that_was_killed_on_another_host(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease is found to be dead by watching it, in the one run there is: no later run starts earlier."""
    monkeypatch.setattr(leases, "LEASE_S", 0.3)
    monkeypatch.setattr(gc, "DEAD_AFTER_S", 5.0)
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    lockfile = root / ".leases" / "gc.lock"
    left_by_another_host(lockfile, 0.3)
    assert lora_fs("gc", "--older-than", "0").code == 0
    assert not (root / "default" / "tiny" / "v1" / "a").exists()
    assert not lockfile.exists()


def test_gc_on_a_full_volume(
    lora_fs: LoraFs, folder: Folder, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lease can be written there, and that is when room is needed."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    with monkeypatch.context() as patch:
        fail(patch, "write", errno.ENOSPC, times=1 << 30)
        fail(patch, "mkdir", errno.ENOSPC, times=1 << 30)
        ran = lora_fs("gc", "--older-than", "0")
    assert ran.code == 0
    assert not (root / "default" / "tiny" / "v1" / "a").exists()


def test_gc_of_a_registry_for_newer_writers(lora_fs: LoraFs, folder: Folder, root: Path) -> None:
    """What a newer lora-fs needs cannot be known here: nothing is removed."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    marker = root / "lora-fs.json"
    marker.write_bytes(seal({**json.loads(marker.read_bytes()), "min_writer": 2}))
    ran = lora_fs("gc", "--older-than", "0")
    assert ran.code == 1
    assert "needs a writer of format 2" in ran.err
    assert (root / "default" / "tiny" / "v1" / "a").is_dir()
    assert lora_fs("gc", "--older-than", "0", "--dry-run").code == 0


def test_nobody_has_told_anything(lora_fs: LoraFs, folder: Folder) -> None:
    """An empty table says why it is empty."""
    lora_fs("register", "a", folder(1))
    assert "no replica of default/tiny has written events of a" in lora_fs("events", "a").err
    assert "no replica of default/tiny has reported" in lora_fs("top", "--once").err


def test_a_list_that_may_lack_something(
    lora_fs: LoraFs, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is shown, and it failed: a script must not take what cannot be read for what is not registered."""
    lora_fs("register", "a", folder(1))
    lora_fs("register", "b", folder(2), "--revision", "r2")
    fail(monkeypatch, "listdir", errno.EACCES, times=1 << 30, when=lambda path: str(path).endswith("r2"))
    ran = lora_fs("list", "-o", "name")
    assert (ran.code, ran.out) == (1, "a\n")
    assert "permission denied" in ran.err
    shown = lora_fs("show", "b")
    assert (shown.code, "is not registered" in shown.err) == (1, False)
    assert lora_fs("show", "a").out.startswith("a in default/tiny serves v1")
    waited = lora_fs("wait", "b", "--timeout", "0")
    assert (waited.code, "cannot be told now" in waited.err) == (6, True)


def test_a_long_reason_is_whole_where_no_terminal_folds_it(
    lora_fs: LoraFs, folder: Folder, report: Report
) -> None:
    """A row of a pipe is one line with all of it, and makes no other row longer."""
    assert lora_fs("register", "a", folder(1)).code == 0
    long = "VolumeUnavailable: " + "word " * 60 + "end"
    report("one", recent=seen(), conditions=(long,))
    head, row, trouble = lora_fs("status").out.splitlines()
    assert f"{long}  0 s ago" in trouble
    assert max(len(head), len(row)) < 100
    assert lora_fs("status", "--no-headers").out.splitlines()[1].strip().startswith("one")


REFUSED = (
    "NotAdopted: {where}: InvalidAdapter: {path} cannot be served:\n"
    "  - adapter_config.json: is not there (looked in {path}; is the copy complete?) [missing-config]"
)


@pytest.mark.parametrize("where", ["default/tiny/v1/broken", "/nim/a.b+c"], ids=["dropped", "flat"])
def test_a_refused_folder_is_named_once(
    lora_fs: LoraFs, folder: Folder, report: Report, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its finding is there to read: in a pipe on its line, and on a terminal folded."""
    path = where if where.startswith("/") else f"/a/long/path/to/the/volume/{where}"
    lora_fs("register", "a", folder(1))
    report("one", recent=seen(), conditions=(REFUSED.format(where=where, path=path),))
    told = f"NotAdopted: {where}: InvalidAdapter: cannot be served: - adapter_config.json: is not there"
    (row,) = (one for one in lora_fs("status").out.splitlines() if "!" in one)
    assert f"{told} (is the copy complete?) [missing-config]" in row
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    lines = lora_fs("status").out.splitlines()
    assert max(map(len, lines)) <= 100
    words = " ".join(" ".join(line[30:92] for line in lines).split())
    assert f"{told} (is the copy complete?) [missing-config]" in words
