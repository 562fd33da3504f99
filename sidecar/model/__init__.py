"""Records and the desired state: frozen types and the grammar of names. No I/O here.

*Desired* is what the volume says, *loaded* is what the engine says, *status* is what one
replica observed. Every field of a type that lora-fs writes to the volume is part of the
on-disk format (``docs/format.md``); unknown fields survive a read and a write.
"""

from typing import TYPE_CHECKING, Any

from lora_fs.sidecar.model.findings import Finding, Severity
from lora_fs.sidecar.model.names import (
    RESERVED_NAMESPACES,
    SEGMENT,
    AdapterKey,
    Scope,
    check_segment,
    engine_name,
    model_slug,
    public_of,
    tells_bytes,
)
from lora_fs.sidecar.model.records import (
    MOST_PRIORITY,
    STORE_STATE,
    AdapterSpec,
    Canary,
    FileEntry,
    LoraShape,
    Origin,
    Pointer,
    Policy,
    PolicyKind,
    Previous,
    Priority,
    Quota,
    Record,
    Source,
    State,
)
from lora_fs.sidecar.model.stored import API_VERSION, JsonObject

if TYPE_CHECKING:
    from lora_fs.sidecar.model.status import (
        AdapterStatus,
        ChangedBy,
        Condition,
        Download,
        EngineLimits,
        Event,
        EventList,
        Phase,
        ReplicaStatus,
        RevisionUsage,
    )

__all__ = [
    "API_VERSION",
    "MOST_PRIORITY",
    "RESERVED_NAMESPACES",
    "SEGMENT",
    "STORE_STATE",
    "AdapterKey",
    "AdapterSpec",
    "AdapterStatus",
    "Canary",
    "ChangedBy",
    "Condition",
    "Download",
    "EngineLimits",
    "Event",
    "EventList",
    "FileEntry",
    "Finding",
    "JsonObject",
    "LoraShape",
    "Origin",
    "Phase",
    "Pointer",
    "Policy",
    "PolicyKind",
    "Previous",
    "Priority",
    "Quota",
    "Record",
    "ReplicaStatus",
    "RevisionUsage",
    "Scope",
    "Severity",
    "Source",
    "State",
    "check_segment",
    "engine_name",
    "model_slug",
    "public_of",
    "tells_bytes",
]


def __getattr__(name: str) -> Any:
    """Import what a replica observed when it is first asked for: a command that lists records does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_fs.sidecar.model import status

    return getattr(status, name)
