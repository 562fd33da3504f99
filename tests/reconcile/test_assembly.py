"""What runs beside a replica, and what it leaves of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lora_fs.sidecar.reconcile.assembly import HANDOVER_S, assemble
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine

pytestmark = pytest.mark.anyio


async def test_threads_hand_the_interpreter_over_sooner_while_it_runs(tmp_path: Path) -> None:
    """A stream's next token does not wait 5 ms for a thread that validates; afterwards all is as it was."""
    usual_s = sys.getswitchinterval()
    settings = Settings(root=tmp_path / "root", model="tiny", stage_dir=tmp_path / "stage")
    assembly = await assemble(settings, Expectation(), FakeEngine())
    async with assembly.running():
        assert sys.getswitchinterval() == pytest.approx(HANDOVER_S)
        assert usual_s > HANDOVER_S
    assert sys.getswitchinterval() == usual_s
