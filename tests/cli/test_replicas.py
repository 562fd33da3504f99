"""--wait, status, doctor and gc: what the command line makes of replicas' reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Phase
from tests.cli.conftest import LoraFs

Folder = Callable[[int], str]
Report = Callable[..., None]

A = "default/tiny/v1/a"


def test_no_replica_to_wait_for(lora_fs: LoraFs, folder: Folder) -> None:
    """It is registered, it says that nobody follows yet, and that is no failure."""
    ran = lora_fs("register", "a", folder(1), "--wait", "5")
    assert ran.code == 0
    assert "no live replica" in ran.err


def test_a_replica_that_follows(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The command ends when the last one has seen it, and stale or foreign ones are not waited for."""
    lora_fs("register", "other", folder(0))
    report("old", age_s=3600)
    report("elsewhere", namespaces=("team-b",))
    report("quick", recent={A: 1})
    report("slow")
    follow = threading.Timer(0.3, report, ("slow",), {"recent": {A: 1}})
    follow.start()
    assert lora_fs("register", "a", folder(1), "--wait", "20").code == 0
    assert not follow.is_alive()


def test_a_replica_that_lags(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """Exit 6, and it is named."""
    report("quick", recent={A: 1})
    report("slow")
    ran = lora_fs("register", "a", folder(1), "--wait", "0.2")
    assert ran.code == 6
    assert "slow" in ran.err
    assert "quick" not in ran.err


@pytest.mark.parametrize("namespaces", [("default",), ("default", "team-b")])
def test_a_replica_that_cannot_load_it(
    lora_fs: LoraFs, folder: Folder, report: Report, namespaces: tuple[str, ...]
) -> None:
    """Exit 1 with its reason, also where it serves several tenants."""
    name = "a" if len(namespaces) == 1 else "default/a"
    report("bad", recent={A: 1}, phases={name: Phase.FAILED}, namespaces=namespaces)
    ran = lora_fs("register", "a", folder(1), "--wait", "5")
    assert ran.code == 1
    assert "bad cannot load a: Failed it is" in ran.err


def test_unregister_waits_until_it_is_gone(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A replica that has seen the tombstone and still drains is waited for."""
    lora_fs("register", "a", folder(1))
    report("r", recent={A: 2}, phases={"a": Phase.DRAINING})
    assert lora_fs("unregister", "a", "--wait", "0.2").code == 6
    report("r", recent={A: 2})
    lora_fs("register", "a", folder(1), "--revision", "v1")
    assert lora_fs("unregister", "a", "--wait", "0").code == 6  # generation 4, seen up to 2


def test_status(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """A row for each adapter on each replica; conditions and stale reports stand out."""
    lora_fs("register", "a", folder(1))
    assert "no replica has reported" in lora_fs("status").out
    report("one", phases={"a": Phase.READY})
    report("two", age_s=300, conditions=("VolumeUnavailable: read-only",))
    rows = {tuple(line.split()[:4]): line for line in lora_fs("status").out.splitlines()}
    assert ("a", "v1", "one", "Ready") in rows
    assert "stale" in rows[("a", "v1", "two", "Evicted")]
    assert any("VolumeUnavailable" in line for line in rows.values())
    assert len(lora_fs("status", "-o", "json").json["replicas"]) == 2


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
    """What that replica uses is not known: no adapter's files are removed."""
    lora_fs("register", "a", folder(1))
    lora_fs("unregister", "a")
    age(root)
    (root / ".replicas" / "torn.json").write_text("{")
    ran = lora_fs("gc")
    assert "torn" in ran.err
    assert (root / "default" / "tiny" / "v1" / "a").is_dir()
