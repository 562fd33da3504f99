"""The schemas hold for what the registry and a replica really write."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from lora_fs import schemas
from lora_fs.sidecar.errors import CorruptRecord, EngineRejected
from lora_fs.sidecar.model import (
    AdapterStatus,
    Phase,
    Pointer,
    Policy,
    PolicyKind,
    Record,
    ReplicaStatus,
    Scope,
)
from lora_fs.sidecar.reconcile.reconciler import Limits
from lora_fs.sidecar.reconcile.status_file import Reporter
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.format.layout import parse_generation
from lora_fs.sidecar.registry.format.sealed import decode, seal, unseal
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.head import Head
from lora_fs.sidecar.registry.store.marker import Marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import Clock, FakeEngine, FakeStager, FakeVolume, Rig
from tests.registry.conftest import write_adapter
from tests.registry.faults import without_links

SCOPE = Scope("default", "tiny")
pytestmark = pytest.mark.anyio
STORED = ("marker", "head", "record", "pointer", "replica-status")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def holds(name: str, value: object) -> None:
    """Check a value against a schema; the schema itself is checked too."""
    schema = schemas.load(name)
    Draft202012Validator.check_schema(schema)
    Draft202012Validator(schema).validate(value)


@pytest.fixture(params=["cas", "lww"])
def registry(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry in which one adapter was registered twice, rolled back and withdrawn."""
    if request.param == "lww":
        without_links(monkeypatch)
    opened = Registry(tmp_path / "root", create=True)
    for seed in (0, 1):
        folder = write_adapter(tmp_path / f"source{seed}", seed=seed)
        policy = Policy(kind=PolicyKind.EAGER, priority=seed) if seed else None
        wanted = Registration("a1", folder, folder.as_uri(), labels={"team": "x"}, policy=policy)
        ingest.register(opened, SCOPE, wanted, Expectation(), writer="test")
    release.rollback(opened, SCOPE, "a1", writer="test")
    release.unregister(opened, SCOPE, "a1", writer="test", all_revisions=True)
    opened.close()
    return opened


def test_every_file_of_a_registry(registry: Registry) -> None:
    """Marker, HEAD, records, tombstones and pointers are valid as they lie there, on either tier."""
    scope = registry.layout.scope(SCOPE)
    found = {
        "marker": [registry.layout.marker],
        "head": [registry.layout.head],
        "record": sorted(scope.glob("v*/*.json")),
        "pointer": sorted((scope / ".active").glob("*.json")),
    }
    assert [len(paths) for paths in found.values()] == [1, 1, 4, 4]
    for name, paths in found.items():
        for path in paths:
            holds(name, unseal(path.read_bytes()))


def test_no_other_json_lies_in_a_registry(registry: Registry) -> None:
    """Every sealed file has one of the schemas above: the format has no file that they leave out."""
    root = registry.layout.root
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    artifacts = {name for name in names if re.fullmatch(r"default/tiny/v[12]/a1/adapter_.*", name)}
    sealed = {name for name in names if "/v" in name or "/.active/" in name} - artifacts
    assert all(parse_generation(Path(name).name) for name in sealed)
    leases = {name for name in names if name.startswith(".leases/")}
    assert names - artifacts - sealed - leases == {"lora-fs.json", "HEAD"}


@pytest.mark.parametrize("kind", [Marker, Head, Record, Pointer, ReplicaStatus])
def test_a_file_without_its_seal_is_invalid(kind: type[BaseModel], registry: Registry) -> None:
    """Neither the reader nor the schema takes one, nor a file of another kind."""
    name = {Marker: "marker", Head: "head", Record: "record", Pointer: "pointer"}.get(kind, "replica-status")
    with pytest.raises(CorruptRecord):
        decode(kind, b"{}")
    assert not Draft202012Validator(schemas.load(name)).is_valid({})
    marker = unseal(registry.layout.marker.read_bytes())
    valid = {one for one in STORED if Draft202012Validator(schemas.load(one)).is_valid(marker)}
    assert valid == {"marker", "head"}  # HEAD has no field that a marker contradicts


def test_a_status_file_of_another_version() -> None:
    """Fields this version does not know are no violation, wherever they stand."""
    one = AdapterStatus(key=("default", "tiny", "v1", "a1"), generation=1, phase=Phase.FAILED, gpu=3)
    status = ReplicaStatus(
        replica="r", model="tiny", namespaces=("default",), adapters={"a1": one}, future=[1]
    )
    holds("replica-status", unseal(seal(status)))


async def test_what_a_replica_reports(tmp_path: Path) -> None:
    """The file it really writes: one adapter loaded, one refused, one registered, all told by name."""
    volume = FakeVolume()
    limits = Limits(Policy(kind=PolicyKind.EAGER), None, resync_s=5, hold_timeout_s=5)
    rig = Rig(FakeEngine(), FakeStager(), volume, Clock(), limits)
    for name in ("a1", "a2"):
        volume.put(name)
    volume.put("a3", policy=Policy())
    rig.engine.refuses["a2"] = EngineRejected("no", reason="rank")
    await rig.settle()
    seen = SimpleNamespace(recent={"default/tiny/v1/a1": 1}, status_problem=None)
    opened = Registry(tmp_path, create=True)
    reporter = Reporter(opened, cast("Volume", seen), "http://10.0.0.7:8001", Expectation())
    path = opened.layout.replica("r0")
    reporter.report(rig.replica)
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "status file"))
    written = unseal(path.read_bytes())
    await reporter.withdraw("r0")
    holds("replica-status", written)
    assert (seen.status_problem, path.exists()) == (None, False)
    phases = {name: one["phase"] for name, one in written["adapters"].items()}
    assert phases == {"a1": "Ready", "a2": "Failed"}
    assert written["counts"] == {"Ready": 1, "Failed": 1, "Unloaded": 1}
    told = {"engine_version": "0.32.0", "runtime_loading": True}
    assert written["limits"] == {**told, "strict_base_model": False, "allow": []}
    assert (written["recent"], written["url"]) == (seen.recent, "http://10.0.0.7:8001")
