"""What runs beside a replica, and what it leaves of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.reconcile import assembly
from lora_fs.sidecar.reconcile.assembly import HANDOVER_S, assemble
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine

pytestmark = pytest.mark.anyio


async def test_threads_hand_the_interpreter_over_sooner_while_it_runs(tmp_path: Path) -> None:
    """A stream's next token does not wait 5 ms for a thread that validates; afterwards all is as it was."""
    usual_s = sys.getswitchinterval()
    settings = Settings(root=tmp_path / "root", create=True, model="tiny", stage_dir=tmp_path / "stage")
    made = await assemble(settings, Expectation(), FakeEngine())
    async with made.running():
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
        assert usual_s > HANDOVER_S
    assert sys.getswitchinterval() == usual_s


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """Of a registry whose volume does not answer before the test has ended."""
    hang = threading.Event()
    monkeypatch.setattr(assembly, "kind_of", lambda _: hang.wait(20) and "tmpfs")
    monkeypatch.setattr(assembly, "SLOW_START_S", 0.05)
    yield Settings(root=tmp_path / "root", model="tiny", stage_dir=tmp_path / "stage", engine_timeout_s=0.2)
    hang.set()


async def test_a_start_on_a_volume_that_hangs(hanging: Settings, caplog: pytest.LogCaptureFixture) -> None:
    """It says which folder does not answer, and ends in time with the same."""
    with pytest.raises(VolumeUnavailable, match=f"{hanging.root} did not answer"):
        await assemble(hanging, Expectation(), FakeEngine())
    assert f"{hanging.root} does not answer: the start waits for it" in caplog.text


async def test_a_start_that_is_stopped(hanging: Settings) -> None:
    """On a volume that hangs it ends at once."""
    settings = hanging.model_copy(update={"engine_timeout_s": 60.0})
    starting = asyncio.create_task(assemble(settings, Expectation(), FakeEngine()))
    await asyncio.sleep(0.1)
    starting.cancel()
    assert await asyncio.wait({starting}, timeout=5) == ({starting}, set())
