"""A registry in a temporary folder and small adapters to put in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.validate import Expectation

MakeAdapter = Callable[..., Path]

SCOPE = Scope("default", "tiny")
TRAINER = "http:trainer@10.0.0.1"  # at two gateways of one machine a trainer is one writer


class Clock:
    """A clock the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Instead of ``time.sleep``."""
        self.now += seconds


def write_adapter(folder: Path, seed: int = 0, rank: int = 4, base: str = "tiny") -> Path:
    """Write a valid adapter whose bytes depend on ``seed``."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = np.random.default_rng(seed)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{module}.lora_A.weight": numbers.random((rank, 16), dtype=np.float32) + 0.1,
            f"{module}.lora_B.weight": numbers.random((16, rank), dtype=np.float32) + 0.1,
        },
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": base,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    def make(name: str = "source", seed: int = 0) -> Path:
        return write_adapter(tmp_path / name, seed)

    return make


@pytest.fixture
def scope() -> Scope:
    return Scope("default", "tiny")


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """Created without the 50 ms that its temporary names outlive their links, and never closed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "UNLINK_AFTER_S", 0.0)
        return Registry(tmp_path / "root", create=True)


@dataclass
class Site:
    """A registry in which ``a`` serves v1, the bytes of seed 1."""

    registry: Registry
    folder: Path

    name: str = "a"
    scope: Scope = SCOPE

    def put(self, seed: int, *, writer: str = "ci", activate: bool = True, origin: str = "register") -> Made:
        """Register a seed's bytes."""
        source = self.folder / str(seed)
        if not source.exists():
            write_adapter(source, seed)
        wanted = Registration(self.name, source, "file:///x", activate=activate, origin=origin)  # type: ignore[arg-type]
        return ingest.register(self.registry, SCOPE, wanted, Expectation(), writer=writer).made

    def load(self, seed: int) -> Made:
        """As ``POST /v1/load_lora_adapter`` does in place."""
        return self.put(seed, writer=TRAINER, origin="api")

    def take_back(self, made: Made, writer: str = TRAINER) -> None:
        take_back(self.registry, SCOPE, self.name, made, writer=writer)

    def state(self) -> tuple[str | None, set[str]]:
        """What the name serves, and what is registered."""
        pointer = release.active(self.registry, SCOPE, self.name)
        serves = pointer.revision if pointer is not None else None
        return serves, set(release.present_revisions(self.registry, SCOPE, self.name))


@pytest.fixture
def site(registry: Registry, tmp_path: Path) -> Site:
    site = Site(registry, tmp_path / "sources")
    site.put(1)
    return site
