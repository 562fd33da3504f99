"""The shapes of what the sidecar takes and answers, vLLM's where vLLM has one.

They are what ``/openapi.json`` and ``schemas/`` are made from.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.model import AdapterStatus, Record


class LoadBody(BaseModel):
    """``POST /v1/load_lora_adapter``: vLLM's LoadLoRAAdapterRequest."""

    lora_name: str
    lora_path: str = Field(description="A folder on the volume, or under an allowed source")
    load_inplace: bool = Field(False, description="Register a new revision if the name exists")
    is_3d_lora_weight: bool = False


class UnloadBody(BaseModel):
    """``POST /v1/unload_lora_adapter``: vLLM's UnloadLoRAAdapterRequest."""

    lora_name: str = Field(description="A name with all its revisions, or name@revision")
    lora_int_id: int | None = None


class ModelCard(BaseModel):
    """One model or adapter, in vLLM's shape."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds")
    owned_by: str = "vllm"
    root: str | None = Field(None, description="An adapter's place on the volume")
    parent: str | None = Field(None, description="The base model, for an adapter")
    max_model_len: int | None = None
    permission: list[Any] = []


class ModelList(BaseModel):
    """``GET /v1/models``: the engine's own cards, then every adapter, sorted by name."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Residency(BaseModel):
    """How an adapter stands in the engine."""

    in_flight: int = Field(description="Requests that use it now")
    idle_s: float = Field(description="Seconds since its last request")
    path: str = Field(description="The staged copy the engine was given")
    engine_name: str = Field(description="What the engine calls it")


class AdapterDescription(BaseModel):
    """An adapter: its record, this replica's status of it, and its residency if it is loaded."""

    name: str
    record: Record
    status: AdapterStatus
    residency: Residency | None


class AdapterList(BaseModel):
    """``GET /v1/lora_adapters``."""

    object: Literal["list"] = "list"
    replica: str
    data: list[AdapterDescription]


class DynamoList(BaseModel):
    """``GET /v1/list_lora_adapters``: the same, in Dynamo's shape."""

    status: Literal["success"] = "success"
    loras: list[AdapterDescription]


class ReadinessBody(BaseModel):
    """``GET /readyz``; 503 while not ready."""

    ready: bool
    conditions: list[str] = Field(description="What is wrong, each ``Type: message``")


class ServedModel(BaseModel):
    """The base model."""

    name: str


class Capabilities(BaseModel):
    """What a router may ask of this replica."""

    lora_support: bool = True
    dynamic_loading: bool = True


class LoadedLora(BaseModel):
    """An adapter in the engine."""

    status: Literal["ready"] = "ready"
    base_model: str
    namespace: str
    revision: str
    memory_usage: int = Field(description="Bytes of its files")
    in_flight: int


class LoraCapacity(BaseModel):
    """How many more may be loaded; null where nothing bounds it."""

    max_loras: int | None
    loaded_count: int
    available_slots: int | None


class LoraEndpoints(BaseModel):
    """Where to load, unload and list."""

    load_lora: str = "/v1/load_lora_adapter"
    unload_lora: str = "/v1/unload_lora_adapter"
    list_loras: str = "/v1/list_lora_adapters"


class LoraMetadata(BaseModel):
    """The adapters of this replica."""

    loaded_loras: dict[str, LoadedLora]
    lora_capacity: LoraCapacity
    lora_endpoints: LoraEndpoints = LoraEndpoints()


class Metadata(BaseModel):
    """``GET /metadata``: what this replica has, for service discovery."""

    model: ServedModel
    replica: str
    ready: bool
    capabilities: Capabilities = Capabilities()
    lora: LoraMetadata


class ErrorDetail(BaseModel):
    """vLLM's error object."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail
