"""Which other replicas count as living, by their status files, on a clock of the test's own."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lora_fs.sidecar.model import AdapterStatus, Phase, ReplicaStatus
from lora_fs.sidecar.reconcile.watch import reports
from lora_fs.sidecar.reconcile.watch.peers import SILENT_S, STARTS_S, Peers
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.store.writer import Registry


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def write(
    registry: Registry,
    replica: str,
    beat: int,
    *loaded: str,
    engine: str = "ready",
    model: str = "tiny",
    namespaces: tuple[str, ...] = ("default",),
) -> None:
    """Write a replica's status file as it would itself."""
    status = ReplicaStatus(
        replica=replica,
        model=model,
        namespaces=namespaces,
        engine=engine,
        heartbeat=beat,
        adapters={
            name: AdapterStatus(key=("default", "tiny", "v1", name), generation=1, phase=Phase.READY)
            for name in loaded
        },
    )
    file = registry.layout.replica(replica)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(seal(status.model_dump(mode="json")))


def test_a_replica_lives_while_its_file_changes(tmp_path: Path) -> None:
    """One that is silent, or leaves, does not count; what the others hold is known."""
    clock, registry = Clock(), Registry(tmp_path, create=True)
    peers = Peers(registry.layout, "r0", "tiny", ["default"], clock)
    before = peers.is_known
    for name in ("r0", "r1", "r2"):
        write(registry, name, 1, "a")
    peers.look()
    assert (before, peers.is_known) == (False, True)
    assert peers.living == {"r1": {"a"}, "r2": {"a"}}
    clock.now += SILENT_S - 1
    write(registry, "r1", 2, "a", "b")
    clock.now += 2
    peers.look()
    assert peers.living == {"r1": {"a", "b"}}
    registry.layout.replica("r1").unlink()
    peers.look()
    assert peers.living == {}


def test_a_replica_that_serves_something_else_is_no_home(tmp_path: Path) -> None:
    """It loads none of these adapters: one that it were the home of would be loaded nowhere."""
    registry = Registry(tmp_path, create=True)
    peers = Peers(registry.layout, "r0", "tiny", ["a", "b"])
    write(registry, "alike", 1, namespaces=("b", "a"))
    write(registry, "fewer", 1, namespaces=("a",))
    write(registry, "more", 1, namespaces=("a", "b", "c"))
    write(registry, "model", 1, namespaces=("a", "b"), model="other")
    peers.look()
    assert set(peers.living) == {"alike"}


def test_a_replica_that_starts_counts_for_a_while_before_its_engine_answers(tmp_path: Path) -> None:
    """An engine that never answers makes its replica no home for ever; one that does, at once."""
    clock, registry = Clock(), Registry(tmp_path, create=True)
    peers = Peers(registry.layout, "r0", "tiny", ["default"], clock)
    for beat in range(int(STARTS_S // 10)):
        write(registry, "r1", beat, engine="unknown")
        peers.look()
        assert set(peers.living) == {"r1"}
        clock.now += 10
    write(registry, "r1", 1000, engine="unknown")
    peers.look()
    assert peers.living == {}
    write(registry, "r1", 1001)
    peers.look()
    assert set(peers.living) == {"r1"}


def test_no_replica_counts_as_alone_before_every_report_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look reads so many; it takes two here to find the one other replica that serves the same."""
    monkeypatch.setattr(reports, "MAX_READ", 2)
    registry = Registry(tmp_path, create=True)
    for name in ("a", "b"):
        write(registry, name, 1, model="other")
    write(registry, "r1", 1)
    peers = Peers(registry.layout, "r0", "tiny", ["default"], Clock())
    known = []
    for _ in range(3):
        peers.look()
        known.append((peers.is_known, set(peers.living)))
    assert known == [(False, set()), (True, {"r1"}), (True, {"r1"})]


def test_reports_that_cannot_be_read_leave_what_was_known(tmp_path: Path) -> None:
    """A half-written file takes no replica out."""
    clock, registry = Clock(), Registry(tmp_path, create=True)
    peers = Peers(registry.layout, "r0", "tiny", ["default"], clock)
    write(registry, "r1", 1, "a")
    peers.look()
    registry.layout.replica("r1").write_bytes(b'{"half')
    peers.look()
    assert peers.living == {"r1": {"a"}}


def test_reports_that_are_away_for_one_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume that is back when its marker is looked at lost no replica."""
    registry = Registry(tmp_path, create=True)
    peers = Peers(registry.layout, "r0", "tiny", ["default"], Clock())
    write(registry, "r1", 1, "a")
    real, away = os.listdir, [registry.layout.replicas]

    def listed(folder: Path) -> list[str]:
        if folder in away:
            away.remove(folder)
            raise FileNotFoundError(errno.ENOENT, "an empty mount point has no such folder", str(folder))
        return real(folder)

    monkeypatch.setattr(os, "listdir", listed)
    peers.look()
    assert peers.living == {"r1": {"a"}}
    assert not away
