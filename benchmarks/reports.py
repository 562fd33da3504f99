"""What many replicas would report, written as they write it: sealed status files, replaced whole."""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from pathlib import Path

from population import SCOPE

from lora_fs.sidecar.model import AdapterStatus, Phase, ReplicaStatus
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.volume import atomic

OTHERS = (Phase.LOADING, Phase.VALIDATING, Phase.PENDING, Phase.DRAINING, Phase.FAILED)


class Reports:
    """``count`` replicas, each with ``loaded`` of ``names`` Ready and a few in other phases."""

    def __init__(self, root: Path, names: Sequence[str], count: int, loaded: int, seed: int = 0) -> None:
        self._layout, self._names, self._chance = Layout(root), names, random.Random(seed)
        self._heartbeats = [0] * count
        self._told: list[dict[str, AdapterStatus]] = []
        for _ in range(count):
            picked = self._chance.sample(names, min(loaded + len(OTHERS), len(names)))
            few = dict(zip(picked, OTHERS, strict=False))
            self._told.append({name: status(name, few.get(name, Phase.READY)) for name in picked})

    def write_all(self) -> None:
        """Every replica reports."""
        for number in range(len(self._told)):
            self.write(number)

    def write(self, number: int) -> None:
        """One replica reports what it has."""
        told = self._told[number]
        self._heartbeats[number] += 1
        beats = self._heartbeats[number]
        ready = sum(one.phase is Phase.READY for one in told.values())
        report = ReplicaStatus(
            replica=f"other-{number:02d}",
            model=SCOPE.model,
            namespaces=(SCOPE.namespace,),
            engine="ready",
            heartbeat=beats,
            updated_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            adapters=dict(sorted(told.items())),
            figures={
                "tier_disk": ready,
                "tier_engine": ready,
                "request_hits": 97 * beats,
                "request_misses": 3,
            },
        )
        self._layout.replicas.mkdir(exist_ok=True)
        atomic.replace(self._layout.replica(report.replica), seal(report))

    def flip(self, number: int, name: str, phase: Phase) -> None:
        """One adapter is in another phase on one replica, which reports it."""
        self._told[number][name] = status(name, phase)
        self.write(number)


def status(name: str, phase: Phase) -> AdapterStatus:
    """As a replica tells it."""
    failed = phase is Phase.FAILED
    return AdapterStatus(
        key=(*SCOPE, "v1", name),
        generation=1,
        phase=phase,
        reason="InvalidAdapter" if failed else "",
        message="the bytes on the volume are not the registered ones" if failed else "",
        attempts=int(failed),
        retry_in_s=60.0 if failed else None,
        since=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
