"""The conformance suite tells a sound filesystem from a broken one, and leaves either as it was."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.conformance import Effort, Verdict, contention, examine, suite
from lora_fs.sidecar.conformance.agent import Agent, AgentError
from lora_fs.sidecar.conformance.pair import SCRATCH, Pair
from lora_fs.sidecar.conformance.visibility import wait_for_change
from lora_fs.sidecar.errors import InputError, NotFound, VolumeUnavailable
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.atomic import TemporaryNames

BRIEF = Effort(quick=True, budget_s=8.0, share_s=0.15, wait_s=0.8, rounds=1)
LAG_S = 0.4


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Every name below a folder, with its size and its time."""
    return {
        str(path.relative_to(root)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in root.rglob("*")
    }


def holds(verdict: Verdict) -> dict[str, bool | None]:
    return {promise.name: promise.holds for promise in verdict.promises}


def test_a_sound_filesystem(tmp_path: Path) -> None:
    """Every promise holds, everything shows at once, and there is nothing to advise."""
    verdict = examine(tmp_path, None, BRIEF)
    assert set(holds(verdict).values()) == {True}
    assert (verdict.ok, verdict.tier, verdict.advice) == (True, "cas", ())
    assert max(delay.bound_s for delay in verdict.delays) < 0.25


def test_what_lies_there_is_left_as_it_was(tmp_path: Path) -> None:
    """A registry, or anything else: no name, no size and no time is another one afterwards."""
    (tmp_path / "default" / "tiny" / ".active").mkdir(parents=True)
    (tmp_path / "HEAD").write_text("not ours")
    (tmp_path / "lora-fs.json").write_text("{")
    before = tree(tmp_path)
    examine(tmp_path, None, BRIEF)
    assert tree(tmp_path) == before


def not_exclusive(path: Path, data: bytes, names: TemporaryNames) -> bool:
    path.write_bytes(data)
    return True


def in_place(path: Path, data: bytes, *, draft_in: Path | None = None, **_: object) -> None:
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), 64):
            file.write(data[at : at + 64])
            time.sleep(0.001)  # as a slow volume: a reader beside it meets a half file, on a busy machine too


@contextmanager
def for_everybody(path: Path, *, wait_s: float) -> Iterator[bool]:
    yield True


def test_two_winners_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a name can be taken twice neither a race nor a sleeping writer goes unnoticed."""
    monkeypatch.setattr(atomic, "publish", not_exclusive)
    verdict = examine(tmp_path, None, BRIEF)
    assert (holds(verdict)["one-winner"], holds(verdict)["fencing"], verdict.ok) == (False, False, False)
    assert verdict.advice[0].startswith("Keep no registry here")


def test_half_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement in place is seen by readers, and the verdict says that it costs time only."""
    monkeypatch.setattr(atomic, "replace", in_place)
    verdict = examine(tmp_path, None, BRIEF)
    assert (holds(verdict)["whole-reads"], verdict.ok) == (False, True)
    assert any("costs time, not data" in line for line in verdict.advice)


def test_a_lease_that_both_hold_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told, and it is no failure: a lease is a hint."""
    monkeypatch.setattr(contention, "lease", for_everybody)
    verdict = examine(tmp_path, None, BRIEF)
    assert (holds(verdict)["lease"], verdict.ok) == (False, True)


def test_no_hard_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tier is lww, what that means is told, and everything else is tried all the same."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refuse)
    verdict = examine(tmp_path, None, BRIEF)
    assert (verdict.tier, verdict.ok, holds(verdict)["fencing"]) == ("lww", False, False)
    assert verdict.delay("registered").unseen == 0


def test_a_listing_that_lags_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its delay is measured, and the mount options are advised."""
    real, kept = atomic.list_names, dict[Path, tuple[float, list[str] | None]]()

    def lagging(folder: Path) -> list[str] | None:
        at, names = kept.get(folder, (0.0, None))
        if time.monotonic() - at > LAG_S:
            at, names = kept[folder] = time.monotonic(), real(folder)
        return names

    monkeypatch.setattr(atomic, "list_names", lagging)
    verdict = examine(tmp_path, None, BRIEF)
    listing = verdict.delay("listing")
    assert listing.worst_s is not None
    assert 0.25 < listing.worst_s < BRIEF.wait_s
    assert any(line.startswith("Mount") and "listing" in line for line in verdict.advice)


def test_one_late_look_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine delays one try of many: the verdict has the delay, and advises no mount options."""
    real, since = atomic.list_names, list[float]()

    def late_once(folder: Path) -> list[str] | None:
        names = real(folder)
        if names and "listed-2" in names:
            since.append(time.monotonic())
            if since[-1] - since[0] < LAG_S:
                names.remove("listed-2")
        return names

    monkeypatch.setattr(atomic, "list_names", late_once)
    # Long enough for many tries, on a busy machine as well.
    verdict = examine(tmp_path, None, BRIEF._replace(budget_s=60.0, share_s=2.0))
    assert verdict.delay("listing").bound_s > 0.25
    assert not any(line.startswith("Mount") for line in verdict.advice)


def test_a_look_that_began_late_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process is run for as long as a cache keeps, no mount options are advised."""
    real = Agent.start

    def start(agent: Agent, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        if function is wait_for_change:
            time.sleep(LAG_S)
        real(agent, function, *arguments, **options)

    monkeypatch.setattr(Agent, "start", start)
    verdict = examine(tmp_path, None, BRIEF)
    assert verdict.delay("create").bound_s >= LAG_S
    assert not any(line.startswith("Mount") for line in verdict.advice)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    """Not found, on either side, and nothing is made."""
    with pytest.raises(NotFound, match="nowhere"):
        examine(tmp_path / "nowhere", None, BRIEF)
    with pytest.raises(NotFound, match="nowhere"):
        examine(tmp_path, tmp_path / "nowhere", BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_two_filesystems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders that do not show the same are refused as input, and both are left empty."""
    monkeypatch.setattr(suite, "ANSWER_S", 0.2)
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="two mounts of one filesystem"):
        examine(tmp_path / "one", tmp_path / "other", BRIEF)
    assert not list(tmp_path.glob(f"*/{SCRATCH}*"))


def test_a_probe_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer left asleep in the midst of a probe, and the scratch folder, are gone."""

    def fail(pair: Pair, *_: object) -> None:
        pair.here.agent.start(signal.raise_signal, signal.SIGSTOP)
        assert pair.here.agent.wait_stopped(10)
        raise VolumeUnavailable("as a mount would")

    monkeypatch.setattr(contention, "races", fail)
    with pytest.raises(VolumeUnavailable, match="as a mount would"):
        examine(tmp_path, None, BRIEF)
    assert list(tmp_path.iterdir()) == []


def test_a_mount_that_hangs_is_told_in_time() -> None:
    """Whoever waits for an agent waits as long as said, and the agent is ended."""
    agent = Agent("/hangs")
    agent.start(signal.pause)
    with pytest.raises(VolumeUnavailable, match="/hangs did not answer"):
        agent.result(0.05)
    agent.end()
    assert not agent._process.is_alive()


def test_errors_keep_their_kind() -> None:
    """What the volume refused is told as such; a defect of the suite is not taken for it."""
    agent = Agent("/mount")
    with pytest.raises(VolumeUnavailable, match=r"/mount: .*No such file"):
        agent.call(10, os.stat, "/nowhere/at/all")
    with pytest.raises(AgentError, match="ZeroDivisionError"):
        agent.call(10, divmod, 1, 0)
    agent.start(os._exit, 0)
    with pytest.raises(AgentError, match="ended by itself"):
        agent.result(10)
    agent.end()
