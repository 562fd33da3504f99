"""Registries and replicas with a trust file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio

from lora_fs.sidecar.errors import InvalidAdapter, LoraFsError
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.reconcile.assembly import Assembly, assemble
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.trust import Trust
from lora_fs.sidecar.trust.signers import hint_of
from lora_fs.sidecar.validate import Expectation, expect
from tests.reconcile.conftest import FakeEngine
from tests.trust.conftest import Key

SCOPE = Scope("default", "tiny")


def register(
    registry: Registry, folder: Path, trust: Trust | None, scope: Scope = SCOPE, *, dry_run: bool = False
) -> Record:
    wanted = Registration("support", folder, folder.as_uri())
    return ingest.register(
        registry, scope, wanted, Expectation(trust=trust), writer="test", dry_run=dry_run
    ).record


def code_of(error: InvalidAdapter) -> str:
    return error.findings[0].code


def stager(registry: Registry, folder: Path, trust: Trust | None) -> Stager:
    def locate(record: Record) -> Path:
        return registry.layout.resolve(record.spec.path)

    made = Stager(folder, locate, Expectation(trust=trust), max_bytes=1 << 30, timeout_s=20)
    made.prepare()
    return made


async def replica(tmp_path: Path, trust: Trust, engine: FakeEngine) -> Assembly:
    settings = Settings(
        root=tmp_path / "registry", model="tiny", stage_dir=tmp_path / "stage", trust=trust.path, resync_s=0.2
    )
    return await assemble(settings, expect(settings), engine)


async def holds(made: Assembly, name: str) -> None:
    """Ask for an adapter as a request does, once its record is seen."""
    await until(lambda: made.replica.lookup(name) is not None)
    async with made.replica.hold(name, 10):
        pass


async def until_held(made: Assembly, name: str) -> None:
    """Ask again and again: a load that failed is tried again after a growing delay."""
    with anyio.fail_after(20):
        while True:
            try:
                return await holds(made, name)
            except LoraFsError:
                await anyio.sleep(0.1)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not holds():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def hint(key: Key) -> str:
    """Return what a signer with this key is called."""
    return hint_of(key.private.public_key())[:12]


def conditions(made: Assembly) -> tuple[str, ...]:
    return made.replica.readiness().conditions
