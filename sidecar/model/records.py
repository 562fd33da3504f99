"""The desired state, as the volume has it: records, pointers, quotas."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, FailFast, Field, field_validator

from lora_fs.sidecar.model.names import AdapterKey, Digest, FileName, Segment
from lora_fs.sidecar.model.stored import Stored, one_by_one

_LORA_SHAPES: dict[LoraShape, LoraShape] = {}
_MOST_LORA_SHAPES = 1_024

# The label of a revision from a store that another system keeps: the state of its folder there; "" once that
# state is gone. A withdrawn revision with it remembers that this state was registered once.
STORE_STATE = "lora-fs/nim-fingerprint"


class PolicyKind(StrEnum):
    """When an adapter is in the engine."""

    LAZY = "lazy"  # loaded at the first request, evicted after ttl_s idle
    STICKY = "sticky"  # loaded at the first request, kept
    EAGER = "eager"  # loaded at boot, by priority, while it fits
    PINNED = "pinned"  # loaded at boot, never evicted


MOST_PRIORITY: Final = 1_000_000_000  # an engine's workers take whole numbers of 64 bits alone
Priority = Annotated[int, Field(ge=-MOST_PRIORITY, le=MOST_PRIORITY)]


def _bounded(priority: int) -> int:
    """Read what lies beyond a bound, whoever wrote it, as the bound."""
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, priority))


class Policy(Stored):
    """When to load and evict. ``ttl_s``: idle seconds, after which a replica evicts a lazy adapter."""

    kind: PolicyKind = PolicyKind.LAZY
    ttl_s: int = Field(default=3600, ge=1)
    priority: Annotated[int, AfterValidator(_bounded)] = 0


class FileEntry(Stored):
    """One file of an artifact: ``path`` is its name in the artifact's folder, and leads nowhere else."""

    _alike = ("path",)

    path: FileName
    size_bytes: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LoraShape(Stored):
    """The facts on which ``adapter_config.json`` and the tensor header agree."""

    _alike = ("dtype",)

    rank: int = Field(ge=1)
    alpha: float
    target_modules: Annotated[tuple[str, ...], FailFast()]
    dtype: str
    use_rslora: bool = False


class Source(Stored):
    """Where the bytes came from: a uri without credentials, and the pinned commit or etag."""

    uri: str
    pin: str | None = None


class AdapterSpec(Stored):
    """The contents and policy of an adapter.

    Attributes:
        path: the artifact's folder; relative to the registry's root, or absolute when linked.
        digest: over the served files' paths, sizes and hashes (``registry.artifacts``).
        fingerprint: over (path, size, mtime) of the folder at its adoption; shows
            that a folder changed in place, without reading it.
        int_id: the engine's integer id: 63 bits, the same on every replica.
        allowed: codes of findings that its registration allowed; a replica allows them, too.
        signer: who signed the bytes, by the check at their registration; a replica checks itself.
        unpinned: the policy to restore at an unpin; meaningless before a pin.
    """

    _alike = ("base_model",)

    source: Source
    path: str
    base_model: str
    digest: Digest
    size_bytes: int = Field(ge=0)
    files: Annotated[tuple[FileEntry, ...], FailFast()]
    lora: LoraShape
    int_id: int = Field(ge=1, lt=2**63)
    policy: Policy | None = None
    labels: Annotated[dict[str, str], one_by_one(str)] = Field(default={})
    fingerprint: str | None = None
    allowed: Annotated[tuple[str, ...], FailFast()] = ()
    unpinned: Policy | None = None
    signer: str | None = Field(default=None, exclude_if=lambda value: value is None)

    @property
    def is_pinned(self) -> bool:
        return self.policy is not None and self.policy.kind is PolicyKind.PINNED

    @field_validator("path")
    @classmethod
    def _may_be_opened(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("no path has a NUL in it")
        return value

    @field_validator("lora")
    @classmethod
    def _share(cls, value: LoraShape) -> LoraShape:
        if len(_LORA_SHAPES) < _MOST_LORA_SHAPES:
            return _LORA_SHAPES.setdefault(value, value)
        return _LORA_SHAPES.get(value, value)


class Previous(Stored):
    """The generation a writer built on."""

    generation: int = Field(ge=1)
    sum: str


class _Generation(Stored):
    """The fields of every generation-named file besides its content."""

    _alike = ("namespace", "model", "name", "revision", "previous_revision", "writer", "origin")

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
    updated_at: str  # RFC 3339; retention by age and a quota's rate rest on it, which record counts does not
    sum: str = ""


class State(StrEnum):
    """Whether somebody wants the thing named."""

    PRESENT = "present"
    DELETED = "deleted"


Origin = Literal["register", "api", "folder", "import"]


class Record(_Generation):
    """One generation of one revision: the truth about it, so that nobody needs the earlier ones.

    Attributes:
        registered_at: ``updated_at`` of its first generation.
    """

    kind: Literal["Adapter"] = "Adapter"
    revision: Segment
    uid: str
    state: State
    origin: Origin
    keep_files: bool = False
    registered_at: str = ""
    spec: AdapterSpec

    @property
    def key(self) -> AdapterKey:
        return AdapterKey(self.namespace, self.model, self.revision, self.name)

    @property
    def told(self) -> dict[str, str]:
        """Its fields for a line of the audit."""
        signer = {} if self.spec.signer is None else {"signer": self.spec.signer}
        return {"revision": self.revision, "digest": self.spec.digest, **signer}

    @property
    def present(self) -> bool:
        return self.state is State.PRESENT

    def following(self, newest: Record | None) -> Record:
        """Its state as the generation after ``newest``. Keeps what that one knew of the earlier ones."""
        first = newest if newest is not None else self
        spec = self.spec
        if newest is not None and spec.is_pinned:
            earlier = newest.spec.unpinned if newest.spec.is_pinned else newest.spec.policy
            spec = spec.model_copy(update={"unpinned": earlier})
        return self.model_copy(
            update={"registered_at": first.registered_at or first.updated_at, "spec": spec}
        )


class Canary(Stored):
    """A share of requests for the plain name that another revision answers."""

    revision: Segment
    percent: int = Field(ge=0, le=100)


class Pointer(_Generation):
    """Which revision the plain name serves; ``revision`` is None once somebody withdrew the name.

    Attributes:
        keep_revisions: how many of the name gc keeps registered; None: as the namespace says.
        undone: the request id of the load's pointer that this write undid; None: it undid none.
    """

    kind: Literal["ActivePointer"] = "ActivePointer"
    revision: Segment | None
    previous_revision: Segment | None = None
    canary: Canary | None = None
    keep_revisions: int | None = Field(default=None, ge=1)
    undone: str | None = None


class Quota(Stored):
    """``<namespace>/.quota.json``: what a namespace may register; null where nothing bounds it.

    Attributes:
        adapters: names, of all its models together.
        size_bytes: of all its registered revisions together.
        registrations_per_minute: changes of policy and labels are none.
        keep_revisions: of each name, where the name itself does not say: gc withdraws older ones.
        require_evaluation: the gate that a revision's evaluation must pass before it serves a plain name.
    """

    apiVersion: Literal["lora-fs/v1"] = "lora-fs/v1"
    kind: Literal["Quota"] = "Quota"
    namespace: Segment
    adapters: int | None = Field(default=None, ge=0)
    size_bytes: int | None = Field(default=None, ge=0)
    registrations_per_minute: int | None = Field(default=None, ge=0)
    keep_revisions: int | None = Field(default=None, ge=1)
    require_evaluation: str | None = Field(default=None, max_length=2_000)
    writer: str
    updated_at: str
    sum: str = ""
