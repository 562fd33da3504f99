"""The only place that reads the environment: ``LORA_FS_*``, and the names the field already uses.

A command-line option beats the environment, the environment beats the default.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from lora_fs.sidecar.model import PolicyKind


def _env(field: str, alias: str) -> AliasChoices:
    """The field's own variable first, then a name the field already uses elsewhere."""
    return AliasChoices(f"LORA_FS_{field.upper()}", alias)


CommaList = Annotated[tuple[str, ...], NoDecode]


class Settings(BaseSettings):
    """Everything the CLI and the sidecar can be told.

    Attributes:
        root: the registry's folder on the shared volume.
        model: the base model: hub id, path or served name.
        namespace: the CLI's namespace; namespaces: those a sidecar serves (default: that one).
        base_config: the base model's ``config.json`` (file or folder), for validation.
        allowed_sources: folders from which the HTTP API may register, and ``--link`` may point to.
        engine_url: where vLLM answers; engine_api_key: sent by the sidecar's own calls.
        token_file: who may register, unregister and read; public_namespaces: what needs no token to
            be read: ``*`` for all that are served, ``-`` for none.
        audit_file: where admin acts are told besides the log.
        stage_dir: the pod-local folder that sidecar and engine both mount at the same path.
        stage_max_bytes: how much it may hold.
        stage_ahead: copy what is registered while the replica runs before it is asked for.
        host_bytes: what adapters may take of each worker's host memory, with the plugin.
        kernels: what computes the adapters in the engine, with the plugin: ``auto``, ``off`` for
            vLLM's own, or the name of a backend.
        max_loaded: how many adapters may be loaded at once; None: unbounded.
        poll_s, scan_s, settle_s: how often HEAD is read, the tree is listed whatever HEAD says,
            and how long a dropped folder must hold still (None: by the kind of filesystem).
        engine_timeout_s: bound on one load or unload call; hold_timeout_s: on a request's wait.
    """

    model_config = SettingsConfigDict(
        env_prefix="LORA_FS_", env_ignore_empty=True, populate_by_name=True, extra="ignore"
    )

    root: Path | None = Field(None, validation_alias=_env("root", "DYNAMO_LORA_PATH"))
    model: str | None = None
    namespace: str = "default"
    namespaces: CommaList = ()
    base_config: Path | None = None
    base_model: str | None = None
    allowed_sources: CommaList = Field(
        (), validation_alias=_env("allowed_sources", "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES")
    )
    allow: CommaList = ()

    engine_url: str = "http://127.0.0.1:8000"
    engine_api_key: str | None = Field(
        None, repr=False, validation_alias=_env("engine_api_key", "VLLM_API_KEY")
    )
    host: str = "0.0.0.0"
    port: int = Field(8001, ge=1, le=65535)
    replica_id: str = Field(default_factory=lambda: f"{socket.gethostname()}")
    advertise_url: str | None = None
    token_file: Path | None = None
    public_namespaces: CommaList = ("*",)
    audit_file: Path | None = None
    stage_dir: Path = Path("/stage")
    stage_max_bytes: int = Field(8 << 30, ge=1)
    stage_ahead: bool = True
    host_bytes: int = Field(4 << 30, ge=0)
    kernels: str = "auto"
    max_loaded: int | None = Field(None, ge=1)
    max_rank: int | None = Field(None, ge=1)
    default_policy: PolicyKind = PolicyKind.LAZY
    default_ttl_s: int = Field(3600, ge=1)
    poll_s: float = Field(0.0, ge=0.0)  # 0: by the kind of filesystem
    scan_s: float = Field(300.0, gt=0)
    settle_s: float | None = Field(None, ge=0)
    resync_s: float = Field(5.0, gt=0)
    engine_timeout_s: float = Field(120.0, gt=0)
    hold_timeout_s: float = Field(120.0, gt=0)
    log_level: str = "info"

    @field_validator("namespaces", "allow", "allowed_sources", "public_namespaces", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("engine_url")
    @classmethod
    def _no_trailing_slash(cls, value: str) -> str:
        return value.rstrip("/")

    def serves(self) -> tuple[str, ...]:
        """The namespaces a sidecar serves."""
        return self.namespaces or (self.namespace,)


def load_settings(**options: Any) -> Settings:
    """Merge options over the environment; an option that is None or () was not given."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return Settings(**given)


def writer_id() -> str:
    """Who writes, for people: ``user@host:pid``."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
