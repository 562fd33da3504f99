"""A program that has a vLLM of its own, run where vLLM is imported already: half a minute less each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_fs.demo.engine import EngineFarm

ENDS_S = 280.0


def run_script(
    farm: EngineFarm, name: str, script: str, model_dir: Path, *arguments: str, env: Mapping[str, str]
) -> Any:
    """Run a script of this folder to its end; returns what its last line says, as JSON.

    Args:
        name: names its log.
        model_dir: its first argument.
    """
    command = [str(Path(__file__).with_name(script)), str(model_dir), *arguments]
    process = farm.start(name, model_dir, env={**env, "SCRIPT": json.dumps(command)})
    try:
        assert process.wait_ended(timeout_s=ENDS_S), process.log_tail()
    finally:
        process.kill()
    try:
        return json.loads(process.log_tail(1))
    except ValueError:
        raise AssertionError(process.log_tail(60)) from None
