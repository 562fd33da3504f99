"""Eager adapters on their homes alone: real sidecars that read each other's status files."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx

from lora_fs.demo.process import LOCAL, Process
from lora_fs.sidecar.model import Policy, PolicyKind
from lora_fs.sidecar.reconcile.placement import rendezvous
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.gateway.conftest import SCOPE, Stubs
from tests.gateway.test_process import until

Complete = Callable[..., httpx.Response]
NAMES = [f"e{number}" for number in range(4)]
HOMES = {"LORA_FS_PLACEMENT": "homes"}


def registered(fleet: Stubs, source: Path) -> None:
    """Register NAMES as eager; the last one asks for two homes."""
    with closing(Registry(fleet.root)) as registry:
        for name in NAMES:
            labels = {"replicas": "2"} if name == NAMES[-1] else {}
            wanted = Registration(
                name, source, source.as_uri(), policy=Policy(kind=PolicyKind.EAGER), labels=labels
            )
            ingest.register(registry, SCOPE, wanted, Expectation(("tiny",)), writer="test")


def loaded(process: Process) -> set[str]:
    told = httpx.get(f"{process.url}/metadata", **LOCAL).json()["lora"]["loaded_loras"]
    return set(told) & set(NAMES)


def expected(ids: set[str]) -> dict[str, set[str]]:
    """What each replica of a fleet holds, of NAMES."""
    homes = {name: rendezvous(name, ids)[: 2 if name == NAMES[-1] else 1] for name in NAMES}
    return {own: {name for name in NAMES if own in homes[name]} for own in ids}


def test_each_eager_adapter_is_on_its_homes_and_stays_until_it_has_arrived_elsewhere(
    fleet: Stubs, tmp_path: Path, complete: Complete
) -> None:
    """Two replicas share the eager adapters; one that ends leaves all to the other, which keeps them."""
    for _ in range(2):
        fleet.add(env=HOMES)
    until(lambda: "replica r1 counts" in fleet.sidecars[0].log_text(), 60)
    until(lambda: "replica r0 counts" in fleet.sidecars[1].log_text(), 60)
    registered(fleet, tmp_path / "source")
    ids = {"r0", "r1"}
    wanted = expected(ids)
    until(lambda: {f"r{n}": loaded(one) for n, one in enumerate(fleet.sidecars)} == wanted, 60)
    told = httpx.get(f"{fleet.sidecars[0].url}/v1/lora_adapters", **LOCAL).json()["data"]
    phases = {one["name"]: one["status"]["phase"] for one in told if one["name"] in NAMES}
    assert {name for name, phase in phases.items() if phase == "Ready"} == wanted["r0"]
    assert "Pending" not in phases.values()
    fleet.sidecars[1].stop()
    until(lambda: loaded(fleet.sidecars[0]) == set(NAMES), 60)
    third = fleet.add(env=HOMES)
    until(lambda: "replica r2 counts" in fleet.sidecars[0].log_text(), 60)
    later = expected({"r0", "r2"})
    until(lambda: loaded(third) == later["r2"], 60)
    assert loaded(fleet.sidecars[0]) == set(NAMES), "nothing is unloaded while its place is not needed"
