"""Leases are hints: what holds one up is bounded, and what breaks one stops nobody."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import filelock._api
import filelock._soft
import pytest
from filelock import SoftFileLease

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import leases
from lora_fs.sidecar.registry.volume.leases import lease
from tests.registry.conftest import Clock, MakeAdapter
from tests.registry.test_operations import put, served
from tests.registry.test_races import FORK


def left_by_another_host(path: Path, lease_s: float = leases.LEASE_S) -> None:
    """The lockfile of a holder that was killed on a host whose processes cannot be asked for."""
    held = SoftFileLease(path, lease_duration=lease_s)
    held.acquire()
    lines = path.read_text().splitlines()
    held.release()
    told = ["host=elsewhere" if line.startswith("host=") else line for line in lines]
    path.write_text("\n".join(told) + "\n")


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    """While a lease is held another taker is refused at once; afterwards it is had."""
    path = tmp_path / "a.lock"
    with lease(path, wait_s=0) as first, lease(path, wait_s=0) as second:
        assert (bool(first), bool(second), second.is_anothers) == (True, False, True)
    with lease(path, wait_s=0) as again:
        assert again
    assert not path.exists()


def test_a_dead_holder_elsewhere_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that asks now and then, and never waits, has it when the lease has run out."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    path = tmp_path / "a.lock"
    left_by_another_host(path)

    def had() -> bool:
        with lease(path, wait_s=0) as first:
            return bool(first)

    for seconds in (0.0, leases.LEASE_S - 0.1):
        clock.now += seconds
        assert not had()
    clock.now += 0.2
    assert had()
    assert not path.exists()


def test_a_stuck_lease_costs_a_writer_a_bounded_wait(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of a register's two writes waits LEASE_WAIT_S, and is done without the lease."""
    source, clock = make_adapter(), Clock()
    left_by_another_host(registry.layout.lease(f"{scope.namespace}--{scope.model}"))
    waiting = SimpleNamespace(perf_counter=clock, sleep=clock.sleep)
    monkeypatch.setattr(filelock._api, "time", waiting)
    put(registry, scope, source)
    assert clock.now == pytest.approx(2 * writer.LEASE_WAIT_S)
    assert served(registry, scope) == {"a1": "v1"}


def _hold_and_die(path: Path) -> None:
    with lease(path, wait_s=5) as had:
        assert had
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_on_this_host_holds_nothing(tmp_path: Path) -> None:
    """Its lockfile stays behind and the next taker has the lease."""
    path = tmp_path / "a.lock"
    holder = FORK.Process(target=_hold_and_die, args=(path,))
    holder.start()
    holder.join()
    assert path.exists()
    with lease(path, wait_s=5) as had:
        assert had


@pytest.mark.parametrize("content", ["", "garbage", "filelock/2\npid=1\n", "\x00" * 4096])
def test_a_garbled_lockfile_is_passed_over(tmp_path: Path, content: str) -> None:
    """A lockfile of no known form is not had, or is had; it raises nothing."""
    path = tmp_path / "a.lock"
    path.write_text(content)
    with lease(path, wait_s=0.05) as had:
        assert had or had.is_anothers


def test_another_version_s_lease_is_passed_over(tmp_path: Path) -> None:
    """A lease of another duration, which cannot be agreed on, is passed over."""
    path = tmp_path / "a.lock"
    left_by_another_host(path, 99.0)
    with lease(path, wait_s=0.05) as had:
        assert not had


def test_without_their_folder_writes_go_on(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """``.leases`` deleted while writers run: they write, and make it anew for HEAD's draft."""
    registry.layout.leases.rmdir()
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v1"}
    assert registry.layout.leases.is_dir()


def test_the_refused_are_remembered_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many leases are refused, the memory of them does not grow for ever."""
    monkeypatch.setattr(leases, "_contended", {})
    monkeypatch.setattr(leases, "_unchanged", {})
    monkeypatch.setattr(leases, "_REMEMBERED", 2)
    for number in range(4):
        left_by_another_host(tmp_path / f"{number}.lock")
        with lease(tmp_path / f"{number}.lock", wait_s=0) as had:
            assert not had
    latest = [str(tmp_path / f"{number}.lock") for number in (2, 3)]  # else a dead holder is never taken over
    assert list(leases._contended) == list(leases._unchanged) == latest


def test_a_process_without_threads_goes_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a pod's bound on processes nothing could refresh it: it is passed over, and given back."""

    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    path = tmp_path / "a.lock"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with lease(path, wait_s=0) as had:
            assert not had
    with lease(path, wait_s=0) as had:
        assert had


def test_an_empty_lockfile_is_removed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a holder leaves that was killed before it wrote its name is nobody's after ABANDONED_S."""
    monkeypatch.setattr(leases, "_unchanged", {})
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    path = tmp_path / "a.lock"

    def had() -> bool:
        with lease(path, wait_s=0) as first:
            return bool(first)

    path.touch()
    for seconds in (0.0, leases.ABANDONED_S - 0.1):
        clock.now += seconds
        assert not had()
    path.unlink()
    path.touch()  # another one, by a holder that lives
    os.utime(path, (1, 1))
    clock.now += 0.2
    assert not had()
    clock.now += leases.ABANDONED_S
    assert not had()
    assert had()


def test_a_dead_holders_lease_where_names_cannot_be_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS and FUSE refuse what filelock takes a dead claim over with: it is had all the same, in time."""
    monkeypatch.setattr(leases, "_unchanged", {})
    monkeypatch.setattr(filelock._soft, "exchange_names", lambda *_: False)
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    path = tmp_path / "a.lock"
    left_by_another_host(path)

    def had() -> bool:
        with lease(path, wait_s=0) as first:
            return bool(first)

    for seconds in (0.0, leases.LEASE_S - 0.1):
        clock.now += seconds
        assert not had()
    os.utime(path, (1, 1))  # its holder lives
    clock.now += 0.2
    assert not had()
    clock.now += leases.LEASE_S
    assert not had()
    assert had()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_the_lockfile_that_was_judged_is_put_back(tmp_path: Path) -> None:
    """Another holder's, taken a moment ago: it has its name again."""
    path = tmp_path / "a.lock"
    left_by_another_host(path)
    judged = leases._look(path)
    path.unlink()
    with lease(path, wait_s=0) as held:
        mine = path.read_bytes()
        leases._take_away(path, judged)
        assert held
        assert path.read_bytes() == mine
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_is_held_is_not_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long others ask, a lockfile with its holder's name in it stays."""
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    path = tmp_path / "a.lock"
    with lease(path, wait_s=0) as held:
        assert held
        for _ in range(3):
            with lease(path, wait_s=0) as had:
                assert not had
        assert path.exists()


def test_a_fork_forgets_the_refused(tmp_path: Path) -> None:
    """A child asks for a lease that its parent was refused as if nobody had asked before."""
    path = tmp_path / "a.lock"
    left_by_another_host(path)
    with lease(path, wait_s=0) as had:
        assert not had
    child = FORK.Process(target=_ask, args=(path,))
    child.start()
    child.join()
    assert child.exitcode == 0


def _ask(path: Path) -> None:
    with lease(path, wait_s=0) as had:
        assert not had
