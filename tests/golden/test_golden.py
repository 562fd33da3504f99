"""Files written by format 1 stay readable for ever, whatever later versions write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from lora_fs import schemas
from lora_fs.sidecar.errors import CorruptRecord
from lora_fs.sidecar.model import AdapterKey, EventList, Phase, Pointer, Quota, Record, ReplicaStatus, Scope
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.format.layout import Layout, parse_generation
from lora_fs.sidecar.registry.format.sealed import decode, seal, unseal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import gc
from lora_fs.sidecar.registry.store import evaluations
from lora_fs.sidecar.registry.store.head import Head
from lora_fs.sidecar.registry.store.marker import Marker, read_marker
from lora_fs.sidecar.registry.store.reader import Reader
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.view import RegistryView

V1 = Path(__file__).parent / "v1"
OWN = Scope("default", "Qwen--Qwen2.5-7B")
SCOPE = V1 / OWN.namespace / OWN.model
RECORD = SCOPE / "v1" / "support.@00000001.json"
EVALUATION = SCOPE / ".evaluations" / "v1" / "support.json"
FUTURE = SCOPE / "v1" / "tomorrow.@00000001.json"


def schema_of(path: Path) -> str:
    """Which schema a file of the tree has."""
    if path.parent.name == ".active":
        return "pointer"
    if path.parent.name == ".replicas":
        return "replica-status"
    if path.parent.name == ".events":
        return "event-list"
    if ".evaluations" in path.parts:
        return "evaluation"
    named = {"HEAD": "head", "lora-fs.json": "marker", ".quota.json": "quota"}
    return named.get(path.name, "record")


FILES = sorted(path for path in V1.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(V1)))
def test_every_seal_and_schema_holds(path: Path) -> None:
    """Today's codec and schemas accept each of them."""
    Draft202012Validator(schemas.load(schema_of(path))).validate(unseal(path.read_bytes()))


def test_the_record() -> None:
    """It says what it said when it was written."""
    record = decode(Record, RECORD.read_bytes())
    assert str(record.key) == "default/Qwen--Qwen2.5-7B/v1/support"
    assert (record.generation, record.present, record.origin) == (1, True, "register")
    assert record.spec.lora.rank == 4
    assert record.spec.digest.startswith("sha256:a7d4a187")
    assert record.spec.policy is not None
    assert (record.spec.policy.kind, record.spec.policy.ttl_s) == ("lazy", 1800)
    assert record.spec.labels == {"team": "care"}


def test_the_evaluation() -> None:
    """It counts for the bytes of the record beside it, and says what it found."""
    record = decode(Record, RECORD.read_bytes())
    found = evaluations.read(Reader(Layout(V1), read_marker(V1)), record)
    assert found is not None
    assert (found.measured.revision, found.passed, found.figures["pass_rate"]) == ("v1", True, 0.94)
    assert evaluations.read(Reader(Layout(V1), read_marker(V1)), other_bytes(record)) is None


def other_bytes(record: Record) -> Record:
    spec = record.spec.model_copy(update={"digest": f"sha256:{64 * '0'}"})
    return record.model_copy(update={"spec": spec})


def test_the_tombstone() -> None:
    """It is the next generation of the same record, and builds on it."""
    before = decode(Record, RECORD.read_bytes())
    gone = decode(Record, RECORD.with_name("support.@00000002.json").read_bytes())
    assert (gone.generation, gone.present, gone.uid) == (2, False, before.uid)
    assert gone.previous is not None
    assert (gone.previous.generation, gone.previous.sum) == (1, before.sum)


def test_the_pointers() -> None:
    """The name served v1, then nothing."""
    first, last = (decode(Pointer, path.read_bytes()) for path in sorted((SCOPE / ".active").glob("*.json")))
    assert (first.revision, last.revision) == ("v1", None)


def test_the_name_on_a_volume_without_links() -> None:
    """It holds the writer's token, which its body repeats."""
    (path,) = (SCOPE / "v1").glob("lww.@*.json")
    parsed = parse_generation(path.name)
    assert parsed is not None
    record = decode(Record, path.read_bytes())
    assert parsed == ("lww", (1, record.token))


def test_the_registry() -> None:
    """The marker is read, HEAD tells its sequence, and a replica what it saw."""
    assert read_marker(V1) == decode(Marker, (V1 / "lora-fs.json").read_bytes())
    assert decode(Head, (V1 / "HEAD").read_bytes()).seq == 2
    status = decode(ReplicaStatus, (V1 / ".replicas" / "pod-a.json").read_bytes())
    assert status.adapters["support"].phase is Phase.READY


def test_a_phase_by_its_earlier_name() -> None:
    """A replica that counts Evicted adapters counts Unloaded ones; one that knows limits tells them."""
    earlier, later = (
        decode(ReplicaStatus, (V1 / ".replicas" / f"{pod}.json").read_bytes()) for pod in ("pod-a", "pod-b")
    )
    assert earlier.counts == later.counts == {"Ready": 1, "Unloaded": 11}
    assert Phase("Evicted") is Phase.UNLOADED
    assert earlier.limits is None
    assert later.limits is not None
    assert (later.limits.max_lora_rank, later.limits.dtype) == (64, None)


def test_the_quota() -> None:
    """What the namespace may register."""
    quota = decode(Quota, (V1 / "default" / ".quota.json").read_bytes())
    assert (quota.namespace, quota.adapters, quota.size_bytes) == ("default", 100, 50 << 30)
    assert quota.registrations_per_minute == 30


def has_all_of(after: Any, before: Any) -> bool:
    """Whether nothing of a file was lost or changed but its seal; fields that came since are fine."""
    if not isinstance(before, dict):
        return bool(after == before)
    return all(name == "sum" or (name in after and has_all_of(after[name], before[name])) for name in before)


def test_fields_of_a_newer_writer_survive() -> None:
    """Read by this version and written again, nothing of them is lost."""
    kept = json.loads(seal(decode(Record, FUTURE.read_bytes())))
    assert has_all_of(kept, json.loads(FUTURE.read_bytes()))
    assert kept["shards"] == [1, 2]
    assert kept["spec"]["quantization"] == {"bits": 4}


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """The files as a registry that this version opens."""
    shutil.copytree(V1, tmp_path / "root")
    return Registry(tmp_path / "root")


def test_the_whole_tree_is_a_registry(registry: Registry) -> None:
    """This version lists and reads every name in it, and finds nothing wrong."""
    view = RegistryView(registry, (OWN,))
    view.refresh()
    desired = view.desired
    assert (desired.problems, desired.frozen) == ({}, None)
    assert {str(key): (r.generation, r.present) for key, r in desired.records.items()} == {
        f"{OWN}/v1/support": (2, False),
        f"{OWN}/v1/lww": (1, True),
        f"{OWN}/v1/tomorrow": (1, True),
    }
    assert [pointer.revision for pointer in desired.pointers.values()] == [None]
    assert gc.in_use(registry) == {AdapterKey(*OWN, "v1", "support")}


def test_fields_of_a_newer_writer_outlive_a_withdrawal(registry: Registry) -> None:
    """The tombstone that this version writes has all that the record had."""
    (gone,) = release.unregister(registry, OWN, "tomorrow", writer="test")
    registry.close()
    path = registry.layout.revision(OWN, "v1") / "tomorrow.@00000002.json"
    before, after = json.loads(FUTURE.read_bytes()), unseal(path.read_bytes())
    assert gone.state == after["state"] == "deleted"
    assert after["previous"] == {"generation": 1, "sum": before["sum"]}
    assert after["shards"] == before["shards"]
    assert has_all_of(after["spec"], before["spec"])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (Head, V1 / "HEAD"),
        (Marker, V1 / "lora-fs.json"),
        (Quota, V1 / "default" / ".quota.json"),
        (Evaluation, EVALUATION),
        (Pointer, SCOPE / ".active" / "support.@00000001.json"),
        (ReplicaStatus, V1 / ".replicas" / "pod-b.json"),
        (EventList, V1 / ".events" / "pod-a.json"),
    ],
)
def test_every_kind_keeps_what_it_does_not_know(kind: type[BaseModel], path: Path) -> None:
    """A field that is added to any file of format 1 is there after a read and a write."""
    newer = seal({**json.loads(path.read_bytes()), "future": {"of": [1, None]}})
    assert has_all_of(json.loads(seal(decode(kind, newer))), json.loads(newer))


@pytest.mark.parametrize(
    ("field", "value"),
    [("state", "archived"), ("origin", "s3"), ("kind", "Other"), ("apiVersion", "lora-fs/v2")],
)
def test_a_value_of_a_newer_writer_is_not_guessed(registry: Registry, field: str, value: str) -> None:
    """The file is reported and the generation before it stays in force, as if its seal did not hold."""
    v1 = registry.layout.revision(OWN, "v1")
    newer = {**json.loads(FUTURE.read_bytes()), "generation": 2, field: value}
    (v1 / "tomorrow.@00000002.json").write_bytes(seal(newer))
    view = RegistryView(registry, (OWN,))
    view.refresh()
    assert [path.rsplit("/", 1)[-1] for path in view.desired.problems] == ["tomorrow.@00000002.json"]
    assert view.desired.records[AdapterKey(*OWN, "v1", "tomorrow")].generation == 1


def test_head_keeps_what_it_does_not_know(registry: Registry) -> None:
    """The next writer raises the sequence and leaves a newer writer's field as it is."""
    head = registry.layout.head
    head.write_bytes(seal({**json.loads(head.read_bytes()), "feed": 7}))
    registry.announce()
    after = unseal(head.read_bytes())
    assert (after["seq"], after["feed"]) == (3, 7)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(V1)))
def test_a_changed_byte_is_seen(path: Path) -> None:
    """None of them is read as another value when one of its letters or digits changed."""
    data = path.read_bytes()
    for at in range(0, len(data), max(1, len(data) // 50)):
        if chr(data[at]).isalnum():
            changed = b"1" if data[at : at + 1] != b"1" else b"2"
            with pytest.raises(CorruptRecord):
                unseal(data[:at] + changed + data[at + 1 :])
