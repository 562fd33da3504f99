"""A volume in memory, where there is one: nothing here waits for a disk, and power is lost in a model."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock._soft
import pytest

from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.volume import leases
from tests.crash import tracing

MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where the volumes of one module lie."""
    tracing.needs_strace()
    made = Path(tempfile.mkdtemp(prefix="lora-fs-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def scratch(folder: Path) -> Path:
    """A fresh folder of one test."""
    return Path(tempfile.mkdtemp(dir=folder))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty or torn lockfile is not waited out; how long that takes is a test of its own."""
    monkeypatch.setattr(leases, "ABANDONED_S", 0.0)
    monkeypatch.setattr(writer, "LEASE_WAIT_S", 0.02)
    monkeypatch.setattr(filelock._soft, "MALFORMED_LOCK_AGE_THRESHOLD", 0.0)
