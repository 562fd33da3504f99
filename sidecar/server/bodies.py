"""The shapes of what the sidecar takes and answers, vLLM's where vLLM has one.

They are what ``/openapi.json`` and ``schemas/`` are made from.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.model import (
    AdapterStatus,
    ChangedBy,
    Condition,
    Download,
    Event,
    EventList,
    Pointer,
    Record,
    ReplicaStatus,
)
from lora_fs.sidecar.model.evaluation import Evaluation
from lora_fs.sidecar.registry.lifecycle.register_as import RegisterAs


class _Answer(BaseModel):
    """Written whole: what has a default is there all the same, and its schema says so."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)


class LoadBody(BaseModel):
    """``POST /v1/load_lora_adapter``: vLLM's LoadLoRAAdapterRequest."""

    lora_name: str = Field(description="What clients send as their model")
    lora_path: str = Field(description="A folder on the volume, or under an allowed source")
    load_inplace: bool = Field(False, description="Register a new revision if the name exists")
    is_3d_lora_weight: bool = Field(
        False, description="Taken for vLLM's clients: lora-fs sees in the adapter's files what it is"
    )


class UnloadBody(BaseModel):
    """``POST /v1/unload_lora_adapter``: vLLM's UnloadLoRAAdapterRequest."""

    lora_name: str = Field(description="A name with all its revisions, or name@revision")
    lora_int_id: int | None = Field(None, description="Taken for vLLM's clients, without effect")


class SageMakerBody(BaseModel):
    """``POST /adapters``: SageMaker's RegisterLoRAAdapterRequest, with vLLM's additions."""

    name: str = Field(description="What clients send as their model")
    src: str = Field(description="As `lora_path` in `POST /v1/load_lora_adapter`")
    load_inplace: bool = Field(False, description="Register a new revision if the name exists")
    is_3d_lora_weight: bool = Field(
        False, description="Taken for vLLM's clients: lora-fs sees in the adapter's files what it is"
    )
    preload: bool = Field(True, description="Taken for SageMaker's clients, without effect")
    pin: bool = Field(False, description="Taken for SageMaker's clients, without effect")


class ModelCard(BaseModel):
    """One model or adapter, in vLLM's shape."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(description="What clients send as their model")
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str = "vllm"
    root: str | None = Field(None, description="An adapter's place on the volume")
    parent: str | None = Field(None, description="The base model, for an adapter")
    max_model_len: int | None = Field(None, description="Tokens; null for an adapter")
    permission: list[Any] = Field([], description="Empty for an adapter")


class ModelList(_Answer):
    """``GET /v1/models``: the engine's own cards, then every adapter, sorted by name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Residency(_Answer):
    """How an adapter stands in the engine."""

    in_flight: int = Field(description="Requests that use it now")
    idle_s: float = Field(description="Seconds since its last request")
    path: str = Field(description="The staged copy that the engine got")
    engine_name: str = Field(description="The engine has it as name or name@revision")
    tier: Literal["gpu", "host"] | None = Field(description="Where; null if the engine does not say")


class AdapterDescription(_Answer):
    """An adapter: its record, this replica's status of it, and its residency in the engine, if any."""

    name: str = Field(description="What clients send as their model")
    record: Record
    status: AdapterStatus
    conditions: list[Condition] = Field(description="What is true of it here, as Kubernetes tells it")
    residency: Residency | None = Field(description="Null unless it is in the engine")
    staged: bool = Field(description="A verified copy lies on this replica's own disk")


class AdapterList(_Answer):
    """``GET /v1/lora_adapters``."""

    object: Literal["list"] = "list"
    replica: str = Field(description="Whose answer this is")
    downloads: list[Download] = Field(description="What this replica fetches, and registers then")
    data: list[AdapterDescription]


class Uploaded(_Answer):
    """``POST /v1/lora_adapters``."""

    name: str = Field(description="What clients send as their model")
    record: Record
    changed: bool = Field(description="False if the registry has these bytes already")
    warnings: list[str] = Field(description="What validation found and did not refuse")


class RegisterFrom(RegisterAs):
    """``POST …/register``: an adapter that lies where the server can read or fetch it."""

    source: str = Field(description="As `lora_path` in `POST /v1/load_lora_adapter`")


class ScopeBody(_Answer):
    """``GET /v1/lora_adapters/{namespace}/{model}``: the registered adapters there."""

    records: list[Record] = Field(description="The newest one of each registered revision")
    pointers: list[Pointer] = Field(description="Of each name: what it serves")
    problems: dict[str, str] = Field(
        description="What cannot be read, and why; the answer has its last good state"
    )


class NameBody(_Answer):
    """``GET /v1/lora_adapters/{namespace}/{model}/{name}``: read from the volume for this call."""

    pointer: Pointer | None = Field(description="What the plain name serves; null: it never served anything")
    revisions: list[Record] = Field(description="The registered ones")
    evaluations: dict[str, Evaluation] = Field(description="The newest of each revision that has one")
    unreadable_evaluations: dict[str, str] = Field(description="Revisions whose one cannot be read, and why")


class ReplicasBody(_Answer):
    """``GET /v1/replicas``: what every replica of the volume reports, of what the caller may read."""

    replicas: list[ReplicaStatus]
    unreadable: dict[str, str] = Field(description="Whose report cannot be read, and why")
    young: list[str] = Field(description="Those of them that wrote it in the last 60 s")


class ReplicaEventsBody(_Answer):
    """``GET /v1/replicas/events``: what happened on every replica lately."""

    lists: list[EventList] = Field(description="One of each replica, the oldest event first")
    unreadable: dict[str, str] = Field(description="Whose events cannot be read, and why")


class LoraInfo(_Answer):
    """An adapter that is in the engine, or was sent there."""

    lora_id: str = Field(description="What clients send as their model")
    status: Literal["loading", "loaded", "unloading", "failed"]
    base_model: str = Field(description="As its registration says")
    namespace: str
    revision: str
    memory_usage: int | None = Field(description="Bytes of its files; null after a withdrawal")
    last_used: float | None = Field(description="Unix time of its last request; null if not in the engine")


class DynamoList(_Answer):
    """``GET /v1/list_lora_adapters``: what is in the engine or on its way, as routers ask for it."""

    status: Literal["success"] = "success"
    loras: list[LoraInfo]


class Events(_Answer):
    """``GET /v1/events``: what happened lately on this replica, the oldest first."""

    object: Literal["list"] = "list"
    replica: str = Field(description="Whose answer this is")
    data: list[Event]


class Health(_Answer):
    """``GET /health``: the process answers."""

    status: Literal["ok"] = "ok"


class ReadinessBody(_Answer):
    """``GET /readyz``; 503 while not ready."""

    ready: bool = Field(description="The engine answers and the volume was read once")
    conditions: list[str] = Field(description="What is wrong, each ``Type: message``")
    changed_by: ChangedBy = Field(
        description="Who changes adapters over HTTP: ``tokens`` of the token file, the engine's ``key``, "
        "callers on this machine (``loopback``), ``any``, or ``nobody``"
    )


class ServedModel(_Answer):
    """The base model."""

    name: str = Field(description="The folder of its scopes: Qwen--Qwen2.5-7B")
    served_names: list[str] = Field(
        description="What the engine serves to everybody without a load: the names of its base model, and "
        "adapters that it was started with"
    )


class Capabilities(_Answer):
    """What a router may ask of this replica."""

    lora_support: bool = True
    dynamic_loading: bool = True


class LoadedLora(_Answer):
    """An adapter in the engine."""

    status: Literal["loaded"] = "loaded"
    base_model: str = Field(description="As its registration says")
    namespace: str
    revision: str
    digest: str = Field(description="Of its bytes")
    memory_usage: int = Field(description="Bytes of its files")
    last_used: float = Field(description="Unix time of its last request")
    in_flight: int = Field(description="Requests that use it now")


class LoraCapacity(_Answer):
    """How many more the engine may load; null where nothing bounds it."""

    max_loras: int | None
    loaded_count: int = Field(
        description="Copies in the engine that the caller may read; all, if it may read every namespace"
    )
    available_slots: int | None = Field(
        description="How many copies more; null also if the caller may not read every namespace"
    )


class LoraEndpoints(_Answer):
    """Where to load, unload and list."""

    load_lora: str = "/v1/load_lora_adapter"
    unload_lora: str = "/v1/unload_lora_adapter"
    list_loras: str = "/v1/list_lora_adapters"


class LoraMetadata(_Answer):
    """The adapters of this replica."""

    loaded_loras: dict[str, LoadedLora] = Field(
        description="By the names that clients send, of which a copy has two if `name@revision` serves `name`"
    )
    lora_capacity: LoraCapacity
    load_seconds: float | None = Field(
        description="What a load takes, its staging included: medians of the last ones. Null: none yet, or "
        "the caller may not read every namespace"
    )
    lora_endpoints: LoraEndpoints = LoraEndpoints()


class EngineQueue(_Answer):
    """An engine's requests, whoever sent them, as its metrics say: read with every look at the engine."""

    running: int = Field(description="In the engine's batch")
    waiting: int = Field(description="Wait for a place in it")


class Metadata(_Answer):
    """``GET /metadata``: what this replica has, for service discovery."""

    model: ServedModel
    replica: str = Field(description="Whose answer this is")
    namespaces: list[str] = Field(description="Served ones that hold something and that the caller may read")
    ready: bool = Field(description="As /readyz says")
    version: str = Field(description="Of lora-fs")
    engine_version: str | None = Field(description="What the engine says; null: it did not yet")
    queue: EngineQueue | None = Field(
        description="Null: the engine does not say, or the caller may not read every namespace"
    )
    paused: list[str] = Field(
        description="`namespace/name` of each adapter whose requests wait since `POST /pause`, of those that "
        "the caller may read; `*`: all requests wait"
    )
    admin_port: int | None = Field(
        description="The only port that answers operations (LORA_FS_ADMIN_PORT); null: every port does"
    )
    capabilities: Capabilities = Capabilities()
    lora: LoraMetadata


class FleetReplica(_Answer):
    """One replica, as a gateway sees it."""

    replica: str | None = Field(description="Its id; null: it did not answer yet")
    url: str = Field(description="Where the gateway reaches it")
    state: Literal["ready", "ejected", "out"] = Field(description="Only a ready one gets requests")
    why: str = Field(description="What keeps it out, or why it is ejected; empty of a ready one")
    ejected_s: float | None = Field(description="Seconds until it gets requests again; null: not ejected")
    in_flight: int = Field(description="Requests that this gateway has there")
    queue: EngineQueue | None = Field(
        None, description="Its engine's, as the replica answered last; null: unknown, or the replica is out"
    )
    loading: int = Field(description="Adapters that it loads for this gateway's requests")
    loaded: int = Field(description="Adapters in its engine that the gateway's token may read")
    capacity: int | None = Field(description="Adapters that its engine may hold; null: unknown or unbounded")
    version: str | None = Field(description="Of lora-fs there; null: it does not say")
    engine_version: str | None = Field(description="Of its engine; null: it does not say")
    seen_s: float | None = Field(description="Seconds since it answered; null: it never did")


class FleetBody(_Answer):
    """``GET /v1/fleet`` at a gateway: every replica that it knows of."""

    object: Literal["fleet"] = "fleet"
    replicas: list[FleetReplica]
    waiting: int = Field(description="Requests that wait until a replica may load their adapter")
    problem: str = Field(
        description="Why the list of replicas, or the token file, cannot be read; empty if both can"
    )
    order: list[str] | None = Field(
        description="Of `adapter`, if the query names one: its homes are the first of these replicas"
    )


class ErrorDetail(_Answer):
    """vLLM's error object."""

    message: str = Field(description="A sentence that says what to do")
    type: str = Field(description="The kind of error, e.g. NotFoundError")
    param: str | None = Field(description="The field of the request that is at fault")
    code: int = Field(description="The HTTP status")


class ErrorBody(_Answer):
    """Every error."""

    error: ErrorDetail
