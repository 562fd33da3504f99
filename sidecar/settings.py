"""The only place that reads the environment: ``LORA_FS_*``, and the names the field already uses.

A command-line option beats the environment, the environment beats the default.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasGenerator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.logs import strike
from lora_fs.sidecar.model import PolicyKind
from lora_fs.sidecar.quantities import bytes_of, seconds_of
from lora_fs.sidecar.setting_checks import engine_address, mounted, server_address, weighed
from lora_fs.sidecar.shared_settings import SHARED, variable


def variables(field: str) -> list[str]:
    """Return the variables of a field, the one that counts first."""
    alias = Settings.model_fields[field].validation_alias
    return [str(one) for one in alias.choices] if isinstance(alias, AliasChoices) else [str(alias)]


def _env(field: str, alias: str) -> AliasChoices:
    """The field's own variable first, then a name the field already uses elsewhere."""
    return AliasChoices(variable(field), alias)


def _shared(field: str) -> Any:
    """A setting that is an option of every command: the option is made from the same words."""
    told = SHARED[field]
    default = told.default or None
    if not told.alias:
        return Field(default, description=told.help)
    return Field(default, description=told.help, validation_alias=_env(field, told.alias))


BODY_MAX_BYTES = 64 << 20
SEND_TIMEOUT_S = 60.0
SIDECAR_SHUTDOWN_S = 30.0  # its engine ends its requests before
GATEWAY_SHUTDOWN_S = 100.0  # of the 120 s that the chart gives its pod; 10 of them go by before the signal
KEEP_ALIVE_S = 75.0  # longer than clients (httpx 5 s) and load balancers (ALB 60 s) keep a connection
ENGINE_CONNECTIONS = 1024
ENGINE_IDLE_TIMEOUT_S = 3600.0

Insecure = Literal["off", "loopback", "any"]
CommaList = tuple[str, ...]


class Settings(BaseModel):
    """Every setting of the CLI and the sidecar. A field with an option describes itself.

    Attributes:
        root: the registry's folder on the shared volume; create: make a registry there if it holds none,
            for demos and development: an empty folder may be an unmounted volume.
        server: a sidecar's URL, for a command without the volume; client_token_file: a file with the
            client's token for it.
        model: the base model: hub id, path or served name.
        namespace: the CLI's namespace; namespaces: those a sidecar serves (default: that one).
        base_config: the base model's ``config.json`` (file or folder), for validation.
        strict_base_model: refuse an adapter that names another base model, also where the
            names cannot tell whether it is another one.
        trust: a file that names who may sign adapters; None: check no signature.
        allowed_remotes: the sources that the HTTP API may fetch from: URIs up to a segment, or ``*``.
        pvc_mounts: ``CLAIM=PATH``: the mount points of ``pvc://`` volumes on this machine.
        lora_downloader_plugin: the class ``my.module.Class`` for sources that are no URI.
        netrc_file: the passwords of web servers and registries, by host; its ``default`` is not used.
        registry_auth_file: docker's ``config.json``, with the passwords of registries.
        fetch_max_bytes, fetch_timeout_s: bounds on one download or upload.
        nim_source: a flat store of adapters that another system keeps, to serve as well; nim_refresh_s:
            seconds between two looks at it.
        engine_api_key: vLLM's ``--api-key``: the sidecar sends it with every call to the engine; a client
            needs it, or a token, to use the engine.
        public_namespaces: those that a caller may read without a token: ``*`` for all served, ``-`` for none.
        insecure: ``off``, nobody; ``loopback`` (or true), callers on this machine; ``any``, whoever reaches
            the port.
        allowed_hosts: host names by which clients reach a replica, and whose web pages may change adapters.
        audit_file: a file that records admin acts besides the log.
        user_header: the header that names a request's user, for canaries; without it the body's
            ``user`` does.
        body_max_bytes: of one request that is read to find its model; in the sidecar those over 1 MiB that
            wait for the engine's answer may have twice as much together.
        send_timeout_s: how long a client may read nothing of an answer that waits for it, before the sidecar
            closes its connection and lets its adapter go.
        keep_alive_s: how long a client's connection without a request stays open.
        shutdown_timeout_s: how long requests under way may take to end after SIGTERM. By default
            GATEWAY_SHUTDOWN_S in a gateway and SIDECAR_SHUTDOWN_S in a sidecar.
        cors_origins: pages' origins (``https://app.example``, or ``*``) that may call the sidecar from a
            browser; empty: none.
        engine_connections: connections from the sidecar to the engine at once; a request that finds none
            free gets 503 after 5 s.
        engine_idle_timeout_s: how long the engine may send no byte of an answer before the sidecar gives up.
            An answer that is not streamed sends none until it is complete. Clients give up before: OpenAI's
            after 600 s, unless you set a longer timeout.
        stage_ahead: what to copy before any request for it: ``new``, adapters registered while the replica
            runs; ``all``, also those registered before its start; ``off``, nothing.
        probe_effect: whether to ask a stock engine, after a load, if the adapter changes any answer.
        host_bytes: the host memory of each worker that adapters may take, with the plugin.
        device_bytes: the pool for adapters in each worker's GPU memory, with the plugin. Not set: with
            ``LORA_FS_KERNELS=triton`` what vLLM's stacks of ``--max-loras`` adapters take, else one adapter.
        eviction: who makes room first in the plugin's memory, among adapters of one priority: ``lru``, the
            least recently used; ``fifo``, the one that came first.
        kernels: what computes the adapters in the engine, with the plugin: ``auto``, ``off`` for
            vLLM's own, or the name of a backend.
        unfit: what the plugin does in a vLLM that it cannot serve in: ``stop``, the server does not start;
            ``serve-base``, it serves the base model alone.
        homes: of an eager or pinned adapter, with ``placement`` ``homes``; its label ``replicas`` beats it.
        namespace_weights: ``NAMESPACE=WEIGHT``: how namespaces share the engine when there is no room
            for all; others weigh 1. Empty: no namespace has a share.
        poll_s, scan_s: how often HEAD is read, and the tree is listed whatever HEAD says.
        engine_timeout_s: bound on one load or unload call; hold_timeout_s: on a request's wait.
    """

    model_config = ConfigDict(
        alias_generator=AliasGenerator(validation_alias=variable), populate_by_name=True, extra="ignore"
    )

    root: Path | None = _shared("root")
    create: bool = False
    server: Annotated[str | None, AfterValidator(server_address)] = _shared("server")
    client_token_file: Path | None = _shared("client_token_file")
    model: str | None = _shared("model")
    namespace: str = _shared("namespace")
    namespaces: CommaList = ()
    base_config: Path | None = _shared("base_config")
    base_model: str | None = None
    strict_base_model: bool = False
    trust: Path | None = Field(None, description="A file that names who may sign adapters")
    allowed_sources: CommaList = Field(
        (),
        validation_alias=_env("allowed_sources", "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES"),
        description="Folder that the API may register from and --link may point to; repeatable",
    )
    allow: CommaList = ()
    nim_source: Path | None = Field(None, validation_alias=_env("nim_source", "NIM_PEFT_SOURCE"))
    nim_refresh_s: float = Field(
        30.0, gt=0, validation_alias=_env("nim_refresh_s", "NIM_PEFT_REFRESH_INTERVAL")
    )
    allowed_remotes: CommaList = ()
    pvc_mounts: Annotated[CommaList, AfterValidator(mounted)] = ()
    lora_downloader_plugin: str | None = None
    netrc_file: Path | None = Field(None, validation_alias=_env("netrc_file", "NETRC"))
    registry_auth_file: Path | None = Field(
        None, validation_alias=_env("registry_auth_file", "REGISTRY_AUTH_FILE")
    )
    fetch_max_bytes: int = Field(8 << 30, ge=1)
    fetch_timeout_s: float = Field(3600.0, gt=0)

    engine_url: Annotated[str, AfterValidator(engine_address)] = Field(
        "http://127.0.0.1:8000", description="vLLM's URL"
    )
    engine_api_key: str | None = Field(
        None, repr=False, validation_alias=_env("engine_api_key", "VLLM_API_KEY")
    )
    replicas: CommaList = Field(
        (), description="A replica's URL, or dns://NAME:PORT; repeatable; by default the registry tells"
    )
    host: str = Field("0.0.0.0", description="Address to listen on")
    port: int = Field(8001, ge=1, le=65535, description="Port to listen on")
    admin_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Port for operations alone, which no other then answers",
    )
    replica_id: str = Field(
        default_factory=lambda: f"{socket.gethostname()}",
        description="Name of the replica's status file; by default the host's name",
    )
    advertise_url: str | None = None
    token_file: Path | None = Field(
        None, description="File with the tokens that may register and read, one a line"
    )
    insecure: Insecure = Field(
        "off", description="Who changes adapters without a token; without a value: callers on this machine"
    )
    public_namespaces: CommaList = ("*",)
    allowed_hosts: CommaList = ()
    audit_file: Path | None = None
    user_header: str | None = None
    body_max_bytes: int = Field(BODY_MAX_BYTES, ge=1)
    send_timeout_s: float = Field(SEND_TIMEOUT_S, gt=0)
    keep_alive_s: float = Field(KEEP_ALIVE_S, gt=0)
    shutdown_timeout_s: float | None = Field(None, gt=0)
    cors_origins: CommaList = ()
    engine_connections: int = Field(ENGINE_CONNECTIONS, ge=1)
    engine_idle_timeout_s: float = Field(ENGINE_IDLE_TIMEOUT_S, gt=0)
    stage_dir: Path = Field(
        Path("/stage"), description="Folder for copies: local, and mounted at the same path for the engine"
    )
    stage_max_bytes: int = Field(8 << 30, ge=1, description="What the stage folder may hold")
    stage_ahead: Literal["new", "all", "off"] = "new"
    probe_effect: bool = False
    host_bytes: int = Field(4 << 30, ge=0)
    device_bytes: int | None = Field(None, ge=1)
    eviction: Literal["lru", "fifo"] = "lru"
    kernels: str = "auto"
    unfit: Literal["stop", "serve-base"] = "stop"
    max_loaded: int | None = Field(
        None, ge=1, description="Adapters in the engine at once; by default what it surely keeps in memory"
    )
    max_rank: int | None = Field(
        None, ge=1, description="The engine's --max-lora-rank; by default ranks are not checked"
    )
    default_policy: PolicyKind = Field(PolicyKind.LAZY, description="Policy of adapters without one")
    placement: Literal["all", "homes"] = Field(
        "all", description="Where eager and pinned adapters are loaded: on all replicas, or on their homes"
    )
    homes: int = Field(1, ge=1)
    default_ttl_s: int = Field(3600, ge=1, description="Idle time of a lazy adapter before it is evicted")
    namespace_weights: Annotated[CommaList, AfterValidator(weighed)] = ()
    poll_s: float = Field(0.0, ge=0.0)  # 0: by the kind of filesystem
    scan_s: float = Field(300.0, gt=0)
    settle_s: float | None = Field(
        None,
        ge=0,
        description="How long a dropped folder must hold still; by default as its filesystem needs",
    )
    resync_s: float = Field(5.0, gt=0)
    engine_timeout_s: float = Field(120.0, gt=0)
    hold_timeout_s: float = Field(120.0, gt=0)
    log_level: str = Field("info", description="Lowest level that is logged")
    log_format: Literal["text", "json"] = Field("text", description="Lines for people, or JSON")
    traces: Literal["off", "otlp", "console"] = Field("off", description="Where OpenTelemetry spans go")

    @model_validator(mode="before")
    @classmethod
    def _over_environment(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Lay options over the environment, where an empty variable is as good as none.

        pydantic-settings does as much, and takes longer to import than a command takes to run.
        """
        variables = {name.upper(): value for name, value in os.environ.items() if value}
        return variables | {variable(name): value for name, value in options.items()}

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """A list has commas. A duration or a size may have a unit, as on the command line."""
        name = str(info.field_name)
        if not isinstance(value, str):
            return value
        if cls.model_fields[name].annotation == CommaList:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if name.endswith("_s"):
            return seconds_of(value)
        return bytes_of(value) if name.endswith("_bytes") else value

    @field_validator("insecure", mode="before")
    @classmethod
    def _switched(cls, value: Any) -> Any:
        switches = {"1": "loopback", "true": "loopback", "0": "off", "false": "off"}
        return switches.get(str(value).lower(), value)

    @field_validator("port", "admin_port", mode="before")
    @classmethod
    def _own_port(cls, value: Any, info: ValidationInfo) -> Any:
        """Kubernetes sets LORA_FS_PORT, as an address, for a Service named lora-fs."""
        is_address = isinstance(value, str) and re.match(r"(tcp|udp|sctp)://", value)
        return cls.model_fields[str(info.field_name)].default if is_address else value

    def mounts(self) -> dict[str, Path]:
        """Where each claim of ``pvc://`` is; ``""`` is the registry's own volume."""
        pairs = (item.partition("=") for item in self.pvc_mounts)
        own = {"": self.root} if self.root is not None else {}
        return {**own, **{claim: Path(path) for claim, _, path in pairs}}

    def weights(self) -> dict[str, int]:
        """Shares of the engine by namespace; empty if no namespace has one."""
        pairs = (item.rpartition("=") for item in self.namespace_weights)
        return {namespace: int(weight) for namespace, _, weight in pairs}

    def hosts(self) -> tuple[str, ...]:
        """Host names by which clients reach a replica: those that are set, and those that it tells others."""
        told = urlsplit(self.advertise_url or "").hostname
        return (*self.allowed_hosts, socket.gethostname(), *((told,) if told else ()))

    def ports(self) -> tuple[int, ...]:
        """Where a server listens: for requests, and for operations if they have a port of their own."""
        return (self.port, *(() if self.admin_port is None else (self.admin_port,)))

    def serves(self) -> tuple[str, ...]:
        """The namespaces a sidecar serves."""
        return self.namespaces or (self.namespace,)


def load_settings(**options: Any) -> Settings:
    """Merge options over the environment; None and () are options that the user left out.

    Raises:
        ValidationError: a value that cannot be.
        InputError: the token file, or the trust file, is said to be nothing.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    settings = Settings(**given)
    if settings.token_file is None and os.environ.get("LORA_FS_TOKEN_FILE") == "":
        raise InputError("LORA_FS_TOKEN_FILE is empty: name a file, or unset it")
    if settings.trust is None and os.environ.get("LORA_FS_TRUST") == "":
        raise InputError("LORA_FS_TRUST is empty: name a file, or unset it")
    return settings


def refusal(error: ValidationError) -> str:
    """Say which variable holds what cannot be, and why; what it holds may be a secret, and is struck."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    variable = name if name.isupper() else f"LORA_FS_{name.upper()}"
    return f"{variable}={strike(str(first['input']))}: {first['msg'].removeprefix('Value error, ')}"


def writer_id() -> str:
    """Who writes, for people: ``user@host:pid``."""
    user = os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid{os.getuid()}"
    return f"{user}@{socket.gethostname()}:{os.getpid()}"
