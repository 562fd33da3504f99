"""The demo is true: every step of it holds on this machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lora_fs.demo.process import child_environment
from lora_fs.demo.volume import LORA_FS


@pytest.mark.parametrize("option", [None, "--sidecar"], ids=["plugin", "sidecar"])
def test_the_demo_ends_with_success(model_dir: Path, option: str | None) -> None:
    """``lora-fs demo`` exits 0, says so, and leaves only what its next run can use."""
    work_dir = model_dir.parent
    ran = subprocess.run(
        [LORA_FS, "demo", "--dir", str(work_dir), *([option] if option else [])],
        capture_output=True,
        text=True,
        env=child_environment({}),
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"All {13 if option else 14} steps held" in ran.stdout
    assert not list(work_dir.glob("run-*"))
