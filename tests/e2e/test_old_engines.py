"""What vLLM answers wrong in silence, by its version, and what a sidecar beside it makes of that.

Each test holds on every vLLM: run it with the oldest one and with the newest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import openai
import pytest
from packaging.version import Version
from safetensors.numpy import load_file, save_file

from lora_fs.demo.pair import Pair
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import Replica, SidecarReplica
from lora_fs.sidecar.validate.since import SINCE
from tests.engine.client import LONG_PROMPT

Adapters = Callable[[int], Path]
Register = Callable[..., None]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
SCALE = 8


def version(replica: Replica) -> Version:
    """What the engine says."""
    answer = httpx.get(f"{replica.engine_url}/version", **LOCAL).raise_for_status()
    return Version(answer.json()["version"])


def scaled(source: Path, folder: Path, *, by_pattern: bool) -> Path:
    """A copy whose ``q_proj`` is scaled, by ``alpha_pattern`` or in its weights."""
    shutil.copytree(source, folder)
    config = json.loads((folder / CONFIG).read_text())
    if by_pattern:
        config["alpha_pattern"] = {"q_proj": SCALE * config["lora_alpha"]}
        (folder / CONFIG).write_text(json.dumps(config))
        return folder
    tensors = load_file(folder / WEIGHTS)
    for name, array in tensors.items():
        if "q_proj" in name and "lora_B" in name:
            tensors[name] = array * SCALE
    save_file(tensors, folder / WEIGHTS)
    return folder


def test_a_name_that_comes_back_with_other_bytes(
    pair: Pair[SidecarReplica], register: Register, adapters: Adapters
) -> None:
    """It is answered from them: vLLM up to 0.30 finds the old ones' prefix blocks by the name alone."""
    register("reference", adapters(7))
    right = pair.a.answer("reference", LONG_PROMPT)
    register("returned", adapters(6))
    assert pair.a.answer("returned", LONG_PROMPT) != right
    pair.volume.run("unregister", "returned", "--all-revisions")
    pair.wait_delisted("returned")
    register("returned", adapters(7))
    assert pair.a.answer("returned", LONG_PROMPT) == right


def test_an_adapter_with_patterns(
    pair: Pair[SidecarReplica], register: Register, adapters: Adapters, tmp_path: Path
) -> None:
    """It is served as it was trained, or refused with the reason by an engine that would ignore them."""
    register("in-weights", scaled(adapters(8), tmp_path / "in-weights", by_pattern=False))
    right = pair.a.answer("in-weights")
    register("plain", adapters(8))
    assert pair.a.answer("plain") != right
    made = str(scaled(adapters(8), tmp_path / "by-pattern", by_pattern=True))
    if version(pair.a) >= SINCE["alpha_pattern"]:
        register("by-pattern", made)
        assert pair.a.answer("by-pattern") == right
        return
    refused = pair.volume.try_run("register", "by-pattern", made)
    assert refused.exit_code == 5
    assert "engine-too-old" in refused.stderr
    pair.volume.run("register", "by-pattern", made, "--force")
    pair.wait_listed("by-pattern")
    with pytest.raises(openai.BadRequestError, match="engine-too-old") as told:
        pair.a.answer("by-pattern")
    assert f"vLLM {version(pair.a)}, ignores it" in str(told.value)
