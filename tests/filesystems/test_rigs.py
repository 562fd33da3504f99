"""The rigs themselves: they leave nothing behind, and what does not run is told or is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.filesystems import conftest, rigs, serve
from tests.filesystems.rigs import REQUIRED, RIGS, Mounted, RigFailed, mounted

ROOT = Path(__file__).parents[2]


@pytest.fixture
def listed() -> ModuleType:
    """`.ci/filesystems.py`, which says what must run."""
    return rigs.ci_filesystems()


def left_of(folder: Path) -> list[str]:
    """Processes that name the folder, and mounts in it, as this machine sees them."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(folder) in line]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if str(folder) in words:
            found.append(words)
    return found


def namespaces_of(init: int) -> set[str]:
    return {os.readlink(f"/proc/{init}/ns/{kind}") for kind in ("pid", "net", "mnt")}


def namespaces_in_use() -> set[str]:
    """Every namespace that a process of this machine is in."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/ns/*"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue  # it has ended
    return found


def fail() -> None:
    raise AssertionError("as a test would")


def test_the_list_of_ci_is_the_list_of_rigs(listed: ModuleType) -> None:
    """No rig is left out of what CI requires, and each is one that can be brought up."""
    assert set(listed.FILESYSTEMS) == set(RIGS) == set(serve.FILESYSTEMS) == set(serve.FLAVOURS)


def test_what_is_required_can_run() -> None:
    """Every filesystem that CI names is known and runs here: none stops running unnoticed."""
    assert rigs.required() <= RIGS.keys()
    assert {name: reason for name in rigs.required() if (reason := rigs.why_not(name)) is not None} == {}


def test_ci_says_what_must_run(listed: ModuleType) -> None:
    """`.ci/run` exports the list under the name that these tests read."""
    script = (ROOT / ".ci/run").read_text()
    assert f'{REQUIRED}=$("${{VENV:-.venv}}/bin/python" .ci/filesystems.py)\nexport {REQUIRED}\n' in script
    assert listed.__doc__


def test_what_ci_finds_unable_is_not_tried(listed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that boots no virtual machine skips what needs one: there it would be an error."""
    monkeypatch.setattr(rigs, "_no_namespaces", lambda: None)
    monkeypatch.setattr(rigs, "no_machine", lambda: "it does not boot")
    monkeypatch.setattr(shutil, "which", lambda program, **_: program)
    assert {rigs.why_not(name) for name in listed.MACHINES} == {"it does not boot"}


def test_one_that_cannot_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is skipped with the reason, which the end of the run repeats."""
    monkeypatch.setattr(conftest, "why_not", lambda _: "no such program")
    monkeypatch.setattr(conftest, "_not_run", told := dict[str, str]())
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="sshfs cannot run here: no such program"):
        conftest.skip_or_fail("sshfs")
    assert told == {"sshfs": "no such program"}


def test_one_that_is_required_and_cannot_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is required the same reason is a failure."""
    monkeypatch.setattr(conftest, "why_not", lambda _: "no such program")
    monkeypatch.setenv(REQUIRED, "tmpfs sshfs")
    with pytest.raises(pytest.fail.Exception, match=r"sshfs is in .* and cannot run: no such program"):
        conftest.skip_or_fail("sshfs")


def test_every_reason_is_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever is missing, it says what, and what to do."""
    monkeypatch.setattr(rigs, "PACKAGES", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(rigs, "_no_namespaces", lambda: None)
    for name in RIGS.keys() - {"tmpfs"}:
        assert (reason := rigs.why_not(name)) is not None
        assert reason.startswith("no ")
    monkeypatch.setattr(rigs, "_no_namespaces", lambda: "not root: …")
    assert rigs.why_not("tmpfs") == "not root: …"


def test_nothing_is_left_when_a_test_fails(volume: Mounted, tmp_path: Path) -> None:
    """No process, no mount and no namespace, though what ran inside raised, and so did the test."""
    folder = tmp_path / "rig"
    folder.mkdir()
    namespaces: set[str] = set()

    def whole_test() -> None:
        with mounted(volume.name, folder) as up:
            namespaces.update(namespaces_of(up.init))
            assert namespaces <= namespaces_in_use()
            assert left_of(folder)
            up.run(fail)

    with pytest.raises(RigFailed, match="as a test would"):
        whole_test()
    assert left_of(folder) == []
    assert not namespaces & namespaces_in_use()
    assert list(folder.iterdir()) == []


def test_nothing_is_left_of_a_killed_run(tmp_path: Path) -> None:
    """A test run that is killed takes its rig with it: what it held on to was its stdin."""
    conftest.skip_or_fail("tmpfs")
    folder = tmp_path / "rig"
    folder.mkdir()
    program = (
        "import os, signal, subprocess, sys\n"
        "words = sys.argv[1:]\n"
        "rig = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "assert rig.stdout.readline() == b'ready\\n'\n"
        "print(rig.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    words = [*rigs.UNSHARE, sys.executable, "-P", serve.__file__, "tmpfs", str(folder), str(rigs.PACKAGES)]
    killed = subprocess.run(
        [sys.executable, "-P", "-c", program, *words], stdout=subprocess.PIPE, text=True, check=False
    )
    rig = int(killed.stdout)
    while Path(f"/proc/{rig}/stat").exists() and " Z " not in Path(f"/proc/{rig}/stat").read_text():
        pass  # bounded by pytest's own time limit
    assert left_of(folder) == []


def test_a_server_that_does_not_come_up_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is no reason to skip: what the server said is told."""
    conftest.skip_or_fail("tmpfs")
    broken = tmp_path / "serve.py"
    broken.write_text("raise SystemExit('no such volume')")
    monkeypatch.setattr(serve, "__file__", str(broken))
    folder = tmp_path / "rig"
    folder.mkdir()
    with pytest.raises(RigFailed, match="tmpfs did not come up: no such volume"), mounted("tmpfs", folder):
        pass
