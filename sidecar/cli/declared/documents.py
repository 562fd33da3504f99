"""A document of ``apply``: which adapter the user wants, and how. An absent field changes nothing."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from lora_fs.sidecar.model import Pointer, PolicyKind, Priority, Record
from lora_fs.sidecar.model.names import Digest, LabelKey, Segment

OWNER: Final = "lora-fs/owner"  # the label that tells who applied a revision


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class DocumentMetadata(_Said):
    """Which adapter it is."""

    name: Segment = Field(description="What clients send as their model")
    namespace: Segment | None = Field(None, description="Null: the namespace of the command")
    labels: dict[LabelKey, str] | None = Field(
        None, description="All its labels; null: they stay as they are"
    )

    @model_validator(mode="after")
    def _owner_is_kept(self) -> DocumentMetadata:
        if OWNER in (self.labels or {}):
            raise ValueError(f"the label {OWNER} is set by --owner")
        return self


class DocumentPolicy(_Said):
    """When it is in the engine."""

    kind: Annotated[PolicyKind | None, Field(strict=False)] = Field(None, description="Null: as it is")
    ttlSeconds: int | None = Field(None, ge=1, description="Idle seconds, after which a lazy one goes")
    priority: Priority | None = Field(None, description="Eager and pinned: greater loads first")


class DocumentSpec(_Said):
    """The adapter to register."""

    source: str = Field(min_length=1, description="A folder, from the document's own, or a URI")
    model: str | None = Field(None, min_length=1, description="The base model; null: that of the command")
    digest: Digest | None = Field(None, description="Of its bytes; `apply` refuses others")
    pin: str | None = Field(
        None, min_length=1, description="The source's commit or etag; `apply` refuses others"
    )
    revision: Segment | None = Field(
        None, description="Its revision; null: the one with its bytes, or a new one"
    )
    policy: DocumentPolicy = Field(DocumentPolicy(), description="When it is in the engine")
    active: bool | None = Field(None, description="The plain name serves it; null: yes, but for a canary")
    canary: int | None = Field(
        None, ge=0, le=100, description="Percent of the name's requests that it answers"
    )
    keepRevisions: int | None = Field(None, ge=1, description="gc keeps so many revisions of the name")
    replicas: int | None = Field(None, ge=0, description="With --wait: so many live replicas have to follow")
    allow: list[str] = Field([], description="Codes of findings to take as warnings")

    @model_validator(mode="after")
    def _one_of_both(self) -> DocumentSpec:
        if self.active and self.canary is not None:
            raise ValueError("active and canary exclude each other: a canary does not serve the name")
        return self

    @property
    def activates(self) -> bool:
        return self.canary is None if self.active is None else self.active


class LoraAdapter(_Said):
    """An adapter to register, as `lora-fs apply` reads it and `lora-fs get -o yaml` writes it."""

    apiVersion: Literal["lora-fs/v1"] = Field(description="Another one than this is not read")
    kind: Literal["LoraAdapter"] = Field(description="What this document is")
    metadata: DocumentMetadata = Field(description="Which adapter it is")
    spec: DocumentSpec = Field(description="The adapter to register")


def document_of(record: Record, pointer: Pointer | None) -> LoraAdapter:
    """The document that asks for what a record says."""
    spec, serves = record.spec, pointer is not None and pointer.revision == record.revision
    policy = spec.policy
    return LoraAdapter(
        apiVersion="lora-fs/v1",
        kind="LoraAdapter",
        metadata=DocumentMetadata(
            name=record.name,
            namespace=record.namespace,
            labels={key: text for key, text in spec.labels.items() if key != OWNER},
        ),
        spec=DocumentSpec(
            model=record.model,
            source=spec.source.uri,
            digest=spec.digest,
            revision=record.revision,
            policy=DocumentPolicy()
            if policy is None
            else DocumentPolicy(kind=policy.kind, ttlSeconds=policy.ttl_s, priority=policy.priority),
            active=serves,
            keepRevisions=pointer.keep_revisions if pointer is not None else None,
            allow=list(spec.allowed),
        ),
    )
