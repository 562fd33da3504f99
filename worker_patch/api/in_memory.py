"""An adapter's files made of tensors, in memory, and judged as every registered folder is."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import AdapterKey, Record, Scope, check_segment, engine_name, model_slug
from lora_fs.sidecar.registry.format.ids import int_id
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.copying import Held, judged
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import load_settings, writer_id
from lora_fs.sidecar.validate import Expectation
from lora_fs.worker_patch.worker.hooks import RPC
from lora_fs.worker_patch.worker.load.alike import CONFIG, WEIGHTS

MEMORY = Path("/dev/shm")  # noqa: S108 -- a folder of our own in it, which only this user may read
ORIGIN = "memory:"  # of registered tensors the source, with their name


class SavesItself(Protocol):
    """A configuration that writes its own file, as PEFT's do."""

    def save_pretrained(self, save_directory: str) -> object: ...


Config = Mapping[str, object] | SavesItself


@dataclass(frozen=True, slots=True)
class Adapter:
    """A valid adapter.

    Attributes:
        public: its name, with its revision if registered.
        identity: the engine's integer id.
    """

    public: str
    digest: str
    identity: int
    size_bytes: int
    dtype: str

    @property
    def engine_name(self) -> str:
        """The id by the bytes: no prefix that one revision computed serves another's request."""
        return engine_name(self.public, self.digest)

    @classmethod
    def of(cls, record: Record) -> Adapter:
        """The adapter of a registered record."""
        spec, public = record.spec, f"{record.name}@{record.revision}"
        return cls(public, spec.digest, spec.int_id, spec.size_bytes, spec.lora.dtype)


@contextmanager
def files_of(tensors: Mapping[str, torch.Tensor], config: Config) -> Iterator[Path]:
    """Write an adapter's folder to memory; where that is too small, to the system's temporary folder.

    Raises:
        InputError: the file's format cannot hold them.
    """
    ready, storages = dict[str, torch.Tensor](), set[int]()
    for name, tensor in tensors.items():
        here = _on_the_host(name, tensor)
        storage = here.untyped_storage().data_ptr()
        ready[name] = here.clone() if storage in storages else here  # the format has no tied tensors
        storages.add(storage)
    size = sum(tensor.nbytes for tensor in ready.values())
    fits = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 2 * size
    with tempfile.TemporaryDirectory(prefix="lora-fs-", dir=MEMORY if fits else None) as made:
        folder = Path(made)
        try:
            save_file(ready, folder / WEIGHTS, metadata={"format": "pt"})
        except (TypeError, KeyError, ValueError) as error:
            raise InputError(f"these are no tensors that a safetensors file can hold: {error}") from error
        if isinstance(config, Mapping):
            (folder / CONFIG).write_text(_json(config))
        else:
            config.save_pretrained(made)
        yield folder


def judge(folder: Path, engine: Any, name: str, *, allow: frozenset[str], register: bool) -> Adapter:
    """Validate an adapter for an engine, and register it if asked to.

    Args:
        engine: vLLM's configuration.
    Raises:
        InputError: the engine has no lora-fs. InvalidAdapter: carries the findings.
        LoraFsError: registering failed, as ``ingest.register`` says.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    if engine.lora_config is None or not hasattr(WorkerBase, RPC):
        raise InputError(
            "this engine has no lora-fs: set VLLM_PLUGINS=lora_fs, and make the engine with enable_lora=True"
        )
    model, most = engine.model_config, engine.lora_config.max_lora_rank
    expectation = Expectation((model.model,), model.hf_config.to_dict(), most, allow)
    check_segment("name", name)
    if register:
        return Adapter.of(_register(folder, name, model.model, expectation))
    with (
        Held.opened(folder, f"adapter {name!r}", follow=True) as held,
        judged(held, expectation, None, still=None) as found,
    ):
        assert found.report.shape is not None
        size, digest = sum(one.size_bytes for one in found.files), found.digest
        identity = int_id(ORIGIN, AdapterKey("", "", "", name), digest)
        return Adapter(name, digest, identity, size, found.report.shape.dtype)


def _register(folder: Path, name: str, model: str, expectation: Expectation) -> Record:
    settings = load_settings()
    if settings.root is None:
        raise InputError("there is no registry to register in: set LORA_FS_ROOT, or leave out register=True")
    scope = Scope(check_segment("namespace", settings.namespace), model_slug(settings.model or model))
    wanted = ingest.Registration(name, folder, ORIGIN + name)
    with closing(Registry(settings.root)) as registry:
        return ingest.register(registry, scope, wanted, expectation, writer=writer_id()).record


def _on_the_host(name: str, tensor: object) -> torch.Tensor:
    """A tensor with memory of its own, as the file's format wants it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta:
        raise InputError(f"{name} is no dense torch.Tensor: give what PEFT's get_peft_model_state_dict gives")
    if hasattr(tensor, "full_tensor"):  # a collective call: the program knows which of its ranks are here
        raise InputError(f"{name} is a DTensor, of which a rank has its shard: give tensor.full_tensor()")
    here = tensor.detach().to("cpu")
    if here.untyped_storage().nbytes() == here.nbytes:
        return here.contiguous()
    return here.clone(memory_format=torch.contiguous_format)  # else that of a transposed part stays so


def _json(config: Mapping[str, object]) -> str:
    try:
        return json.dumps(config, default=_plain)
    except TypeError as error:
        raise InputError(f"the configuration is not JSON: {error}") from error


def _plain(value: object) -> object:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise InputError(f"the configuration holds a {type(value).__name__}, which is not JSON: {value!r}")
