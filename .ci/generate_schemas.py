"""Write ``schemas/*.json`` from the types: every file on the volume, every body of the HTTP API.

``make schemas`` runs it; a test fails while the files differ from what it would write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lora_fs.sidecar.model import Pointer, Record, ReplicaStatus
from lora_fs.sidecar.registry.root import Head, Marker
from lora_fs.sidecar.server import bodies

FOLDER = Path(__file__).parents[1] / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
BASE = "https://lora-fs.dev/schemas/v1"

STORED: dict[str, type[BaseModel]] = {
    "marker": Marker,
    "head": Head,
    "record": Record,
    "pointer": Pointer,
    "replica-status": ReplicaStatus,
}
API: dict[str, type[BaseModel]] = {
    "load-request": bodies.LoadBody,
    "unload-request": bodies.UnloadBody,
    "model-card": bodies.ModelCard,
    "model-list": bodies.ModelList,
    "lora-adapters": bodies.AdapterList,
    "list-lora-adapters": bodies.DynamoList,
    "metadata": bodies.Metadata,
    "readiness": bodies.ReadinessBody,
    "error": bodies.ErrorBody,
}


def schema(name: str) -> dict[str, Any]:
    """The schema of one type: requests as they are read, everything else as it is written."""
    kind = {**STORED, **API}[name]
    mode = "validation" if name.endswith("-request") or name in STORED else "serialization"
    body = kind.model_json_schema(mode=mode)  # type: ignore[arg-type]
    return {"$schema": DIALECT, "$id": f"{BASE}/{name}.json", **body}


def render(name: str) -> str:
    """The file's text."""
    return json.dumps(schema(name), indent=2, sort_keys=True) + "\n"


def main() -> None:
    """Write them all, and remove those of types that are gone."""
    names = {**STORED, **API}.keys()
    for path in FOLDER.glob("*.json"):
        if path.stem not in names:
            path.unlink()
    for name in names:
        (FOLDER / f"{name}.json").write_text(render(name), encoding="utf-8")


if __name__ == "__main__":
    main()
