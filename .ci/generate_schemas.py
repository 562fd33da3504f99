"""Write ``schemas/*.json`` from the types: every file on the volume, every body of the HTTP API.

``make schemas`` runs it; a test fails while the files differ from what it would write.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from lora_fs.sidecar.cli.declared.documents import LoraAdapter
from lora_fs.sidecar.evaluation.cases import Case
from lora_fs.sidecar.model import EventList, Pointer, Quota, Record, ReplicaStatus
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.lifecycle.acts import ACTS, Done
from lora_fs.sidecar.registry.lifecycle.register_as import Outcome
from lora_fs.sidecar.registry.store.head import Head
from lora_fs.sidecar.registry.store.marker import Marker
from lora_fs.sidecar.server import bodies
from lora_fs.sidecar.server.routes import dynamo

FOLDER = Path(__file__).parents[1] / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BASE = "https://lora-fs.dev/schemas/v1"

STORED: dict[str, type[BaseModel]] = {
    "marker": Marker,
    "head": Head,
    "record": Record,
    "pointer": Pointer,
    "quota": Quota,
    "replica-status": ReplicaStatus,
    "event-list": EventList,
    "evaluation": Evaluation,
}
API: dict[str, type[BaseModel]] = {
    "load-request": bodies.LoadBody,
    "unload-request": bodies.UnloadBody,
    "sagemaker-load-request": bodies.SageMakerBody,
    "dynamo-load-request": dynamo.LoadLora,
    "dynamo-lora": dynamo.LoraDone,
    "dynamo-loras": dynamo.Loras,
    "model-card": bodies.ModelCard,
    "model-list": bodies.ModelList,
    "lora-adapters": bodies.AdapterList,
    "list-lora-adapters": bodies.DynamoList,
    "events": bodies.Events,
    "metadata": bodies.Metadata,
    "health": bodies.Health,
    "readiness": bodies.ReadinessBody,
    "error": bodies.ErrorBody,
    "register-request": bodies.RegisterFrom,
    **{f"{kind.word}-request": kind for kind in ACTS},
    "act": Done,
    "outcome": Outcome,
    "scope": bodies.ScopeBody,
    "name": bodies.NameBody,
    "replicas": bodies.ReplicasBody,
    "replica-events": bodies.ReplicaEventsBody,
}

SEAL = {
    "description": "SHA-256 of the canonical JSON of the object without this field",
    "pattern": "^[0-9a-f]{64}$",
    "title": "Sum",
    "type": "string",
}

# What a reader of the files needs to know of a field whose name does not say it, by the type's name.
GENERATION = {
    "apiVersion": "Another one than this is not read",
    "kind": "What this file is",
    "namespace": "As the folder it lies in",
    "model": "As the folder it lies in: the base model's id with / written --",
    "name": "As the file's name begins",
    "generation": "As the file's name says; the greatest one of a name is in force",
    "previous": "What this one builds on; null for the first that could be read",
    "epoch": "The marker's, at the time of the write",
    "request_id": "Of the write, random",
    "token": "Of the write, random: no two writers have the same bytes",
    "writer": "For people",
    "updated_at": "RFC 3339. Which record counts never rests on it; retention by age and a quota's rate do",
    "sum": SEAL["description"],
}
FIELDS: dict[str, dict[str, str]] = {
    "Marker": {
        "format": "The format of this registry, for people",
        "min_reader": "The least format that a reader has to know",
        "min_writer": "The least format that a writer has to know",
        "registry_uuid": "Which registry this is: readers refuse another one in its place",
        "epoch": "A restore from a backup raises it",
        "tier": "cas: link() decides who writes; lww: the last writer wins",
    },
    "Head": {
        "epoch": "The marker's",
        "seq": "Raised by each write",
        "snap": "Kept for later",
        "gc_floor": "A seq: tombstones written before it may be gone",
        "first": "The generation that a new series begins with",
        "nonce": "Random, so that two writes at one seq differ",
    },
    "Change": {
        "nonce": "The nonce of the HEAD that it came with",
        "files": "The written files, from the root; none: a reader has to list",
    },
    "Previous": {"generation": "Its number", "sum": "Its seal"},
    "Record": {
        **GENERATION,
        "revision": "As the folder it lies in",
        "uid": "Of the revision, through all its generations",
        "origin": "Who registered it: a folder that goes withdraws only what `folder` registered",
        "keep_files": "gc never removes the files",
        "registered_at": "updated_at of its first generation; empty: its own",
    },
    "Pointer": {
        **GENERATION,
        "revision": "What the plain name serves; null: nothing",
        "previous_revision": "What a rollback goes back to",
        "canary": "Another revision that answers a share of the requests; null: none",
    },
    "Quota": {
        "apiVersion": "Another one than this is not read",
        "kind": "What this file is",
        "namespace": "As the folder it lies in",
        "adapters": "Names, of all its models together; null: any number",
        "size_bytes": "Of all its registered revisions together; null: any",
        "registrations_per_minute": "Changes of policy and labels do not count; null: any number",
        "keep_revisions": "Of a name that does not say itself, gc keeps so many; null: all",
        "require_evaluation": "The gate that a revision must pass before it serves a plain name; null: none",
        "writer": "For people",
        "updated_at": "RFC 3339. For people",
    },
    "Canary": {"revision": "The other one", "percent": "Its share of the requests"},
    "Condition": {
        "type": "What it is about",
        "status": "Whether it is so",
        "reason": "Why, one word",
        "message": "Why, for people",
        "lastTransitionTime": "RFC 3339: when `status` was last another",
    },
    "Event": {
        "type": "Warning: something needs attention",
        "reason": "What happened, one word",
        "message": "What happened, for people",
        "key": "namespace, model, revision, name; null: of the replica itself",
        "count": "How often, from first_at to last_at",
        "first_at": "RFC 3339, by the replica's clock",
        "last_at": "RFC 3339, by the replica's clock",
    },
    "EventList": {
        "apiVersion": "Another one than this is not read",
        "kind": "What this file is",
        "replica": "As the file's name begins",
        "model": "The folder of its scopes",
        "updated_at": "RFC 3339. For people",
        "events": "The last ones; the one that happened last is at the end",
    },
    "AdapterSpec": {
        "base_model": "As its registration says",
        "digest": "Over the paths, sizes and hashes of `files`: docs/format.md",
        "size_bytes": "Of `files`",
        "files": "The served ones, config and weights; others in the folder are not part of it",
        "policy": "When to load and evict it; null: as the sidecar is set",
        "labels": "For people and their tools",
        "allowed": "Codes of findings that its registration allowed",
        "unpinned": "Of a pinned one: the policy that it had before",
    },
    "FileEntry": {
        "path": "Its name in the artifact's folder",
        "size_bytes": "Its length",
        "sha256": "Of its content",
    },
    "LoraShape": {
        "rank": "The greatest one of its modules",
        "alpha": "The scaling's numerator",
        "target_modules": "The modules that it changes",
        "dtype": "Of its tensors",
        "use_rslora": "Scaled by the root of the rank",
    },
    "Policy": {
        "kind": "lazy: loaded when asked for, evicted idle; sticky: kept; eager: at boot; pinned: for good",
        "ttl_s": "Idle seconds, after which a lazy one goes",
        "priority": "The greatest eager one loads first",
    },
    "Source": {"uri": "Without credentials", "pin": "The commit or etag"},
    "ReplicaStatus": {
        "apiVersion": "Another one than this is not read",
        "kind": "What this file is",
        "replica": "As the file's name begins",
        "model": "The folder of its scopes",
        "namespaces": "Those that it serves",
        "url": "Where other hosts reach its sidecar",
        "engine": "ready or unknown",
        "heartbeat": "Counts the writes",
        "updated_at": "RFC 3339. A replica that is silent for a minute counts as gone",
        "counts": "How many adapters are in each phase",
        "adapters": "By served name; `counts` alone has unloaded ones",
        "recent": "The last 512 series it saw, and their generations",
        "conditions": "What is wrong there, each `Type: message`",
        "downloads": "What it fetches, by the name that it will have",
        "figures": "Counters since its start, and gauges such as what is in which tier",
    },
    "Download": {
        "name": "What clients will send as their model",
        "namespace": "Of the registration",
        "source": "Where it comes from: a URI without userinfo and query",
        "reason": "What is being done, or that another process fetches it",
        "received_bytes": "What is here",
        "size_bytes": "Of all of it; null where the source does not say",
        "since": "RFC 3339: the time of the request",
    },
    "AdapterStatus": {
        "key": "namespace, model, revision, name",
        "generation": "Of the record",
        "reason": "Of the phase, one word",
        "message": "Of the phase, for people",
        "attempts": "How often it failed",
        "retry_in_s": "Seconds until the next try; null: nothing waits",
        "since": "RFC 3339: when the phase began",
    },
}


DOCUMENTS: dict[str, type[BaseModel]] = {"lora-adapter": LoraAdapter, "evaluation-case": Case}


def schema(name: str) -> dict[str, Any]:
    """The schema of one type: files and requests as they are read, answers as they are written."""
    kind = {**STORED, **API, **DOCUMENTS}[name]
    mode: Literal["validation", "serialization"] = "serialization"
    if name.endswith("-request") or name in STORED or name in DOCUMENTS:
        mode = "validation"
    body = kind.model_json_schema(mode=mode)
    if name in STORED:  # a file without its seal is no file, whatever the type defaults to
        body["properties"]["sum"] = SEAL
        body["required"] = [*body.get("required", ()), "sum"]
    for shape in (body, *body.get("$defs", {}).values()):
        _describe(shape)
    return {"$schema": DIALECT, "$id": f"{BASE}/{name}.json", **body}


def _describe(shape: dict[str, Any]) -> None:
    """Put what is said of a type's fields, here or in its docstring, where a schema says it."""
    summary, _, attributes = inspect.cleandoc(shape.get("description", "")).partition("\n\nAttributes:\n")
    shape["description"] = _plain(summary)
    for name, text in FIELDS.get(shape["title"], {}).items():
        shape["properties"][name]["description"] = text
    for match in re.finditer(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
        shape["properties"][match[1]].setdefault("description", _plain(match[2]))
    for field in shape.get("properties", {}).values():
        if "description" in field:
            field["description"] = _plain(field["description"])


def _plain(text: str) -> str:
    """One line, without the marks of a docstring."""
    return " ".join(text.replace("``", "`").split())


def render(name: str) -> str:
    """The file's text."""
    return json.dumps(schema(name), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write them all, and remove those of types that are gone."""
    names = {**STORED, **API, **DOCUMENTS}.keys()
    for path in FOLDER.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    for name in names:
        (FOLDER / f"{name}.json").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
