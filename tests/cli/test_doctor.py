"""``lora-fs doctor`` as it tries a filesystem: for people, for scripts, and by its exit code."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.cli.volume import doctor
from lora_fs.sidecar.conformance import Effort, Verdict
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.marker import read_marker
from tests.cli.conftest import LORA_FS, LoraFs
from tests.registry.faults import copy_instead

BRIEF = Effort(quick=True, budget_s=8.0, share_s=0.05, wait_s=0.5, rounds=1)


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of a second a probe."""
    monkeypatch.setattr(doctor, "QUICK", BRIEF)


def test_a_folder_without_a_registry(lora_fs: LoraFs, bare: Path) -> None:
    """It is tried and told; no registry is made, and that there is none is no failure."""
    bare.mkdir()
    ran = lora_fs("doctor", "--root", str(bare), "--quick")
    assert ran.code == 0
    for words in ("one-winner", "how late", "small files a second", "read head every", "holds no registry"):
        assert words in ran.out.lower()
    assert list(bare.iterdir()) == []


def test_a_registry_is_checked_as_well(lora_fs: LoraFs, folder: Callable[[int], str], root: Path) -> None:
    """What is found of the filesystem comes before what is found of the registry."""
    lora_fs("register", "a", folder(1))
    told = lora_fs("doctor", "--peer", str(root), "--quick", "-o", "json").json
    verdict = Verdict.model_validate(told["filesystem"])
    assert (verdict.root, verdict.peer, verdict.ok) == (str(root), str(root), True)
    assert any("registered in default/tiny" in check["text"] for check in told["checks"])


def test_without_the_options_nothing_is_tried(lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """The registry alone is looked at, as ever."""
    lora_fs("register", "a", folder(1))
    assert lora_fs("doctor", "-o", "json").json["filesystem"] is None


def test_a_broken_promise_fails(lora_fs: LoraFs, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A needed promise that does not hold is marked, and exits with 1."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    ran = lora_fs("doctor", "--quick", "--root", str(root))
    assert ran.code == 1
    assert "NO     one-winner" in ran.out
    assert "-> Keep no registry here" in ran.out


def test_a_folder_that_is_not_there(lora_fs: LoraFs, bare: Path) -> None:
    """Exit 3, with its path."""
    ran = lora_fs("doctor", "--quick", "--root", str(bare))
    assert ran.code == 3
    assert str(bare) in ran.err


@pytest.mark.parametrize("made_by", ["link", "copy"])
def test_a_mount_on_which_links_are_copies(
    lora_fs: LoraFs, bare: Path, monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    """It says so of the filesystem, and of the registry, through whichever mount that was made."""
    if made_by == "link":
        marker.create(bare)
    monkeypatch.setattr(os, "link", copy_instead)
    if made_by == "copy":
        assert marker.create(bare).marker.tier == "lww"
    verdict = Verdict.model_validate(lora_fs("doctor", "--quick", "-o", "json").json["filesystem"])
    assert (verdict.ok, verdict.tier) == (False, "lww")
    ran = lora_fs("doctor")
    says = "are copies" if made_by == "link" else "tier lww"
    assert (ran.code, says in ran.out) == (1, True)


def test_a_registry_that_takes_no_write(lora_fs: LoraFs, folder: Callable[[int], str], root: Path) -> None:
    """Of a newer lora-fs, or with a damaged quota: told, though all there is can be read."""
    lora_fs("register", "a", folder(1))
    (root / "default/.quota.json").write_text("{}")
    ran = lora_fs("doctor")
    assert (ran.code, "registered in default/tiny" in ran.out) == (1, True)
    assert "BAD" in ran.out
    assert ".quota.json" in ran.out
    (root / "default/.quota.json").unlink()
    assert lora_fs("doctor").code == 0
    marker = read_marker(root).model_copy(update={"min_writer": 2})
    (root / "lora-fs.json").write_bytes(seal(marker))
    ran = lora_fs("doctor")
    assert ran.code == 1
    assert "cannot write" in ran.out
    assert "writer of format 2" in ran.out


def test_a_signal_to_all_processes(tmp_path: Path) -> None:
    """``timeout`` signals the command, then its whole group: the command tidies up, and says one line."""
    with subprocess.Popen(
        [LORA_FS, "doctor", "--root", str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            while running.poll() is None and not any(tmp_path.iterdir()):
                time.sleep(0.01)
            running.terminate()
            while running.poll() is None:
                os.killpg(running.pid, signal.SIGTERM)
                time.sleep(0.01)
            _, stderr = running.communicate(timeout=60)
        finally:
            running.kill()
    assert (running.returncode, stderr.strip()) == (130, "lora-fs: interrupted")
    assert list(tmp_path.iterdir()) == []
