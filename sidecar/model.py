"""What a record is and what is desired: frozen types and the grammar of names. No I/O here.

*Desired* is what the volume says, *loaded* is what the engine says, *status* is what one
replica observed. Every field of a type that is written to the volume is part of the
on-disk format (``docs/format.md``); unknown fields survive a read and a write.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, TypeAdapter

from lora_fs.sidecar.errors import InvalidName

API_VERSION = "lora-fs/v1"
SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED_NAMESPACES = frozenset({"lora-fs.json", "HEAD"})

Segment = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
FileName = Annotated[str, Field(pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]{0,254}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def check_segment(what: str, value: str) -> str:
    """Return ``value`` if it may become a folder's name, else raise InvalidName."""
    if not SEGMENT.fullmatch(value):
        raise InvalidName(
            what,
            value,
            "use 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or a digit",
        )
    if what == "namespace" and value in RESERVED_NAMESPACES:
        raise InvalidName(what, value, "this name is kept for the registry's own files")
    return value


def model_slug(model: str) -> str:
    """Name the folder of a base model: ``Qwen/Qwen2.5-7B`` → ``Qwen--Qwen2.5-7B``.

    A filesystem path gives its last component, so that a model mounted at ``/models/llama``
    and served as ``llama`` are one scope.

    Raises:
        InvalidName: nothing usable is left.
    """
    bare = model.rstrip("/")
    if bare.startswith(("/", "./", "../", "~")):
        bare = bare.rsplit("/", 1)[-1]
    return check_segment("model", bare.replace("/", "--"))


class Scope(NamedTuple):
    """One base model of one tenant: the folder ``<namespace>/<model>``."""

    namespace: str
    model: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.model}"


class AdapterKey(NamedTuple):
    """The identity of a revision: ``namespace/model/revision/name``."""

    namespace: str
    model: str
    revision: str
    name: str

    @property
    def scope(self) -> Scope:
        return Scope(self.namespace, self.model)

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def checked(cls, namespace: str, model: str, revision: str, name: str) -> AdapterKey:
        """Build a key from text of unknown origin; raises InvalidName."""
        return cls(
            check_segment("namespace", namespace),
            check_segment("model", model),
            check_segment("revision", revision),
            check_segment("name", name),
        )


_FIELD_SETS: dict[frozenset[str], set[str]] = {}
_MOST_FIELD_SETS = 1_024


def _one_by_one(kind: type) -> BeforeValidator:
    """Stop at the first value that is none: of a file with a million, an error each took gigabytes."""
    of_one: TypeAdapter[Any] = TypeAdapter(kind)

    def each(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: of_one.validate_python(item) for name, item in value.items()}

    return BeforeValidator(each)


class _Stored(BaseModel):
    """A type on the volume: frozen, and fields of a newer writer survive."""

    model_config = ConfigDict(frozen=True, extra="allow")

    def model_post_init(self, context: Any) -> None:
        """Share the set of given fields, 2 KB a record, among all that were given the same."""
        given = self.__pydantic_fields_set__
        if len(_FIELD_SETS) < _MOST_FIELD_SETS:  # unknown fields are anybody's choice
            shared = _FIELD_SETS.setdefault(frozenset(given), given)
            object.__setattr__(self, "__pydantic_fields_set__", shared)


class PolicyKind(StrEnum):
    """When an adapter is in the engine."""

    LAZY = "lazy"  # loaded at the first request, evicted after ttl_s idle
    STICKY = "sticky"  # loaded at the first request, kept
    EAGER = "eager"  # loaded at boot, by priority, while it fits
    PINNED = "pinned"  # loaded at boot, never evicted


class Policy(_Stored):
    """When to load and evict. ``ttl_s``: idle seconds before a lazy adapter is evicted."""

    kind: PolicyKind = PolicyKind.LAZY
    ttl_s: int = Field(default=3600, ge=1)
    priority: int = 0


class FileEntry(_Stored):
    """One file of an artifact: ``path`` is its name in the artifact's folder, and leads nowhere else."""

    path: FileName
    size_bytes: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LoraShape(_Stored):
    """What ``adapter_config.json`` and the tensor header agree on."""

    rank: int = Field(ge=1)
    alpha: float
    target_modules: Annotated[tuple[str, ...], FailFast()]
    dtype: str
    use_rslora: bool = False


class Source(_Stored):
    """Where the bytes came from: a uri without credentials, and the pinned commit or etag."""

    uri: str
    pin: str | None = None


class AdapterSpec(_Stored):
    """What an adapter is.

    Attributes:
        path: the artifact's folder; relative to the registry's root, or absolute when linked.
        digest: over the served files' paths, sizes and hashes (``registry.artifacts``).
        fingerprint: over (path, size, mtime) of the folder when it was adopted; tells a
            folder that changed in place from one that did not, without reading it.
        int_id: the engine's integer id: 63 bits, the same on every replica.
    """

    source: Source
    path: str
    base_model: str
    digest: Digest
    size_bytes: int = Field(ge=0)
    files: Annotated[tuple[FileEntry, ...], FailFast()]
    lora: LoraShape
    int_id: int = Field(ge=1, lt=2**63)
    policy: Policy | None = None
    labels: Annotated[dict[str, str], _one_by_one(str)] = {}
    fingerprint: str | None = None


class Previous(_Stored):
    """The generation a writer built on."""

    generation: int = Field(ge=1)
    sum: str


class _Generation(_Stored):
    """What every generation-named file carries besides its content."""

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    namespace: Segment
    model: Segment
    name: Segment
    generation: int = Field(ge=1)
    previous: Previous | None = None
    epoch: int = Field(default=1, ge=1)
    request_id: str
    token: str
    writer: str
    updated_at: str  # RFC 3339; for people, no decision rests on it
    sum: str = ""


class State(StrEnum):
    """Whether the thing named is wanted."""

    PRESENT = "present"
    DELETED = "deleted"


Origin = Literal["register", "api", "folder", "import"]


class Record(_Generation):
    """One generation of one revision: the truth about it."""

    kind: Literal["Adapter"] = "Adapter"
    revision: Segment
    uid: str
    state: State
    origin: Origin
    keep_files: bool = False
    spec: AdapterSpec

    @property
    def key(self) -> AdapterKey:
        return AdapterKey(self.namespace, self.model, self.revision, self.name)

    @property
    def present(self) -> bool:
        return self.state is State.PRESENT


class Canary(_Stored):
    """A share of requests for the plain name that another revision answers."""

    revision: Segment
    percent: int = Field(ge=0, le=100)


class Pointer(_Generation):
    """Which revision the plain name serves; ``revision`` is None once the name is withdrawn."""

    kind: Literal["ActivePointer"] = "ActivePointer"
    revision: Segment | None
    previous_revision: Segment | None = None
    canary: Canary | None = None


class Quota(_Stored):
    """``<namespace>/.quota.json``: what a namespace may register; null where nothing bounds it.

    Attributes:
        adapters: names, of all its models together.
        size_bytes: of all its registered revisions together.
        registrations_per_minute: records written that say present.
    """

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["Quota"] = "Quota"
    namespace: Segment
    adapters: int | None = Field(default=None, ge=0)
    size_bytes: int | None = Field(default=None, ge=0)
    registrations_per_minute: int | None = Field(default=None, ge=0)
    writer: str
    updated_at: str
    sum: str = ""


class Phase(StrEnum):
    """Where an adapter stands on one replica."""

    PENDING = "Pending"
    DOWNLOADING = "Downloading"
    VALIDATING = "Validating"
    LOADING = "Loading"
    READY = "Ready"
    EVICTED = "Evicted"
    DRAINING = "Draining"
    FAILED = "Failed"


class AdapterStatus(_Stored):
    """What one replica last observed of one served name."""

    key: tuple[str, str, str, str]
    generation: int
    phase: Phase
    reason: str = ""
    message: str = ""
    attempts: int = 0
    retry_in_s: float | None = None
    since: str = ""


class ReplicaStatus(_Stored):
    """``.replicas/<replica>.json``: a hint, replaced whole; see docs/format.md."""

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["ReplicaStatus"] = "ReplicaStatus"
    replica: str
    model: str
    namespaces: Annotated[tuple[str, ...], FailFast()]
    url: str | None = None
    engine: str = "unknown"  # "ready", "unknown" or "rejected: …"
    heartbeat: int = 0
    updated_at: str = ""
    counts: Annotated[dict[str, int], _one_by_one(int)] = {}
    adapters: Annotated[
        dict[str, AdapterStatus], _one_by_one(AdapterStatus)
    ] = {}  # by served name; Evicted ones are only counted
    recent: Annotated[
        dict[str, int], _one_by_one(int)
    ] = {}  # series seen lately → generation: answers `--wait`
    conditions: Annotated[tuple[str, ...], FailFast()] = ()
    sum: str = ""


class Severity(StrEnum):
    """``error`` refuses the adapter, ``warning`` is told and passes."""

    ERROR = "error"
    WARNING = "warning"


class Finding(BaseModel):
    """One thing validation saw: which file, which field, what is wrong, what changes it."""

    model_config = ConfigDict(frozen=True)

    code: str
    severity: Severity
    file: str
    field: str = ""
    message: str
    hint: str = ""

    def render(self) -> str:
        """One line for people: ``adapter_config.json: r: is missing (…)``."""
        where = f"{self.file}: {self.field}" if self.field else self.file
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}: {self.message}{hint} [{self.code}]"


JsonObject = dict[str, Any]
