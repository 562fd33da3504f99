"""Reinforcement learning: a program trains an adapter, and its own vLLM serves every step's from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_fs.demo.engine import ENGINE_ENV, PLUGIN_ENV

NEAR = 2e-5


def test_each_steps_answers_are_pefts(model_dir: Path, tmp_path: Path) -> None:
    """Also of the step before, until it is unloaded; no registry is there."""
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("in_process.py")), str(model_dir)],
        env={**os.environ, **ENGINE_ENV, **PLUGIN_ENV},
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    earlier = None
    for step in seen["steps"]:
        assert step["vllm"] == pytest.approx(step["peft"], rel=1e-6, abs=NEAR)
        if earlier is not None:
            assert step["earlier"] == pytest.approx(earlier, rel=1e-6, abs=NEAR)
            assert step["vllm"] != pytest.approx(earlier, abs=0.01)
        assert step["vllm"] != pytest.approx(seen["base"], abs=0.01)
        earlier = step["peft"]
