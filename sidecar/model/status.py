"""One replica's observations, for the others: hints.

One decision rests on them, and only to do less: gc keeps what a replica reports, and
while a report is unreadable it keeps everything.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, FailFast, Field

from lora_fs.sidecar.model.stored import Stored, one_by_one


class Phase(StrEnum):
    """The phase of an adapter on one replica."""

    PENDING = "Pending"
    DOWNLOADING = "Downloading"
    VALIDATING = "Validating"
    LOADING = "Loading"
    READY = "Ready"
    UNLOADED = "Unloaded"
    DRAINING = "Draining"
    FAILED = "Failed"

    @classmethod
    def _missing_(cls, value: object) -> Phase | None:
        """Take ``Evicted``, which files and filters of earlier versions have, for ``Unloaded``."""
        return cls.UNLOADED if value == _EVICTED else None


_EVICTED = "Evicted"


def _renamed(counts: dict[str, int]) -> dict[str, int]:
    return {Phase.UNLOADED.value if phase == _EVICTED else phase: count for phase, count in counts.items()}


class Condition(Stored):
    """One thing that is true of an adapter on a replica or not, in the shape that Kubernetes has."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str = ""
    lastTransitionTime: str  # RFC 3339: when ``status`` was last another


class AdapterStatus(Stored):
    """One replica's last observation of one served name.

    Attributes:
        since: RFC 3339, of the phase.
        signer: who signed the bytes, as this replica checked when it loaded them.
        effect: whether the bytes change the base model's answers; None: not known.
    """

    key: tuple[str, str, str, str]
    generation: int
    phase: Phase
    reason: str = ""
    message: str = ""
    attempts: int = 0
    retry_in_s: float | None = None
    since: str = ""
    signer: str | None = Field(default=None, exclude_if=lambda value: value is None)
    effect: Literal["some", "none"] | None = Field(default=None, exclude_if=lambda value: value is None)


class Download(Stored):
    """A download that becomes an adapter at its registration.

    Attributes:
        name: what clients will send as their model.
        source: a uri without credentials.
        phase: Downloading, and Validating once all of it is here.
        size_bytes: None where the source does not say.
        since: RFC 3339.
    """

    name: str
    namespace: str
    source: str
    phase: Phase
    reason: str = ""
    received_bytes: int = Field(default=0, ge=0)
    size_bytes: int | None = Field(default=None, ge=0)
    since: str = ""

    def progress(self) -> str:
        """Say how much is here: ``120.0 of 500.0 MB``, or ``120.0 MB`` for an unknown size."""
        here = f"{self.received_bytes / 1e6:.1f}"
        return f"{here} MB" if self.size_bytes is None else f"{here} of {self.size_bytes / 1e6:.1f} MB"


def _known(ge: int | None = None) -> Any:
    """A field that is left out of the file where it is None."""
    return Field(default=None, ge=ge, exclude_if=lambda value: value is None)


class EngineLimits(Stored):
    """What a replica judges adapters by. What it does not know is absent from the file.

    Attributes:
        engine_version: what the engine says, such as 0.32.0.
        runtime_loading: whether the engine can load adapters.
        max_lora_rank: the greatest rank.
        dtype: what the engine computes in, such as bfloat16.
        base_models: names of the base model, compared with the one that an adapter names.
        engine_models: further names, by which the engine knows it.
        base_config: those fields of its config.json that a replica compares with an adapter's tensors.
        strict_base_model: whether it refuses another name, also where names cannot tell.
        allow: codes of findings that this replica takes as warnings.
    """

    engine_version: str | None = _known()
    runtime_loading: bool | None = _known()
    max_lora_rank: int | None = _known(ge=1)
    dtype: str | None = _known()
    base_models: Annotated[tuple[str, ...] | None, FailFast()] = _known()
    engine_models: Annotated[tuple[str, ...] | None, FailFast()] = _known()
    base_config: dict[str, int | str] | None = _known()
    strict_base_model: bool | None = _known()
    allow: Annotated[tuple[str, ...] | None, FailFast()] = _known()


class RevisionUsage(Stored):
    """Requests for one revision on one replica since its start, and how long its loads took.

    Attributes:
        requests: those that named it.
        errors_4xx: requests that got a status of 400 to 498.
        errors_5xx: requests that got a status of 500 or more.
        loads: the engine's successful loads.
        load_seconds: the sum of their durations.
    """

    requests: int = Field(default=0, ge=0)
    errors_4xx: int = Field(default=0, ge=0)
    errors_5xx: int = Field(default=0, ge=0)
    loads: int = Field(default=0, ge=0)
    load_seconds: float = Field(default=0.0, ge=0)


ChangedBy = Literal["tokens", "key", "loopback", "any", "nobody"]
RECENT = 512  # series in one replica's status file


class ReplicaStatus(Stored):
    """``.replicas/<replica>.json``: a hint, replaced whole; see docs/format.md.

    Attributes:
        engine: "ready", "unknown" or "rejected: …".
        adapters: by served name; ``counts`` alone has unloaded ones.
        adapters_left_out: that wait or failed, and for which ``adapters`` has no room.
        recent: series seen lately → generation, the last RECENT: answers `--wait`.
        conditions_since: when each kind of condition began, in RFC 3339.
        downloads: by the name they will have.
        figures: counters, and the adapters in each tier, as of this write.
        limits: the limits that it judges adapters by; None: its version does not report them.
        usage: by ``namespace/model/revision/name``; the canaries, then those with the most requests.
        usage_left_out: revisions with counts that ``usage`` has no room for.
        changed_by: who changes adapters over HTTP; None: its version does not report it.
    """

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["ReplicaStatus"] = "ReplicaStatus"
    replica: str
    model: str
    namespaces: Annotated[tuple[str, ...], FailFast()]
    url: str | None = None
    engine: str = "unknown"
    heartbeat: int = 0
    updated_at: str = ""
    counts: Annotated[dict[str, int], one_by_one(int), AfterValidator(_renamed)] = Field(default={})
    adapters: Annotated[dict[str, AdapterStatus], one_by_one(AdapterStatus)] = Field(default={})
    adapters_left_out: int = Field(default=0, ge=0)
    recent: Annotated[dict[str, int], one_by_one(int)] = Field(default={})
    conditions: Annotated[tuple[str, ...], FailFast()] = ()
    conditions_since: Annotated[dict[str, str], one_by_one(str)] = Field(default={})
    downloads: Annotated[dict[str, Download], one_by_one(Download)] = Field(default={})
    figures: Annotated[dict[str, float], one_by_one(float)] = Field(default={})
    limits: EngineLimits | None = None
    usage: Annotated[dict[str, RevisionUsage], one_by_one(RevisionUsage)] = Field(default={})
    usage_left_out: int = Field(default=0, ge=0)
    changed_by: ChangedBy | None = None
    sum: str = ""


class Event(Stored):
    """Something that happened on a replica; ``count`` says how often, as in Kubernetes.

    Attributes:
        key: namespace, model, revision, name; None of the replica itself.
        first_at, last_at: RFC 3339, by the replica's clock.
    """

    type: Literal["Normal", "Warning"] = "Normal"
    reason: str
    message: str = ""
    key: tuple[str, str, str, str] | None = None
    count: int = Field(default=1, ge=1)
    first_at: str
    last_at: str


class EventList(Stored):
    """``.events/<replica>.json``: what happened there lately, the oldest first: a hint, replaced whole."""

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["EventList"] = "EventList"
    replica: str
    model: str
    updated_at: str = ""
    events: Annotated[tuple[Event, ...], FailFast()] = ()
    sum: str = ""
