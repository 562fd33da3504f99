"""Files written by format 1 stay readable for ever, whatever later versions write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.model import Phase, Pointer, Record, ReplicaStatus
from lora_fs.sidecar.registry.codec import decode, seal, unseal
from lora_fs.sidecar.registry.layout import parse_generation
from lora_fs.sidecar.registry.root import Head, Marker, read_marker

V1 = Path(__file__).parent / "v1"
SCOPE = V1 / "default" / "Qwen--Qwen2.5-7B"
RECORD = SCOPE / "v1" / "support.@00000001.json"
FUTURE = SCOPE / "v1" / "tomorrow.@00000001.json"


def schema_of(path: Path) -> str:
    """Which schema a file of the tree has."""
    if path.parent.name == ".active":
        return "pointer"
    if path.parent.name == ".replicas":
        return "replica-status"
    return {"HEAD": "head", "lora-fs.json": "marker"}.get(path.name, "record")


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


def test_fields_of_a_newer_writer_survive() -> None:
    """Read by this version and written again, nothing of them is lost."""
    kept = json.loads(seal(decode(Record, FUTURE.read_bytes())))
    assert kept == json.loads(FUTURE.read_bytes())
    assert kept["shards"] == [1, 2]
    assert kept["spec"]["quantization"] == {"bits": 4}
