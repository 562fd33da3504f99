"""Adapters' files vanish or break after they were loaded: the engine must not die of it.

The engines here hold two adapters in all, so one is evicted at every other request and its
files are read again. A stock vLLM that finds them gone or cut short in a step ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import Replica

NAMES = ("first", "second", "third", "fourth")


@pytest.fixture(scope="module")
def engine_args() -> tuple[str, ...]:
    """Two slots, and no room beside them."""
    return ("--max-loras", "2", "--max-cpu-loras", "2")


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """A replica has the copies it was asked for, and no other."""
    return {"stage_ahead": "off"}


@pytest.fixture(scope="module")
def answers(
    pair: Pair[Replica], register: Callable[..., None], adapters: Callable[[int], Path]
) -> dict[str, str]:
    """Four adapters and what they answer on a; the last two evict the first two."""
    for seed, name in enumerate(NAMES, start=31):
        register(name, adapters(seed))
    return {name: pair.a.answer(name) for name in NAMES}


def test_weights_cut_short_after_loading(pair: Pair[Replica], answers: dict[str, str]) -> None:
    """What is served is the verified copy, not what lies on the volume now."""
    os.truncate(pair.volume.scope_dir / "v1" / "first" / "adapter_model.safetensors", 1000)
    for _ in range(2):
        assert {name: pair.a.answer(name) for name in NAMES} == answers
    assert pair.a.engine.alive


def test_folder_removed_after_loading(pair: Pair[Replica], answers: dict[str, str]) -> None:
    """A registered adapter outlives its folder where its copy is staged."""
    shutil.rmtree(pair.volume.scope_dir / "v1" / "second")
    for _ in range(2):
        assert {name: pair.a.answer(name) for name in NAMES} == answers
    assert pair.a.engine.alive


def test_a_staged_copy_cut_short_or_removed(pair: Pair[Replica], answers: dict[str, str]) -> None:
    """The next load has it made anew first: the engine serves all on."""
    for damage in ("cut short", "removed"):
        for name in ("third", "fourth"):
            [copy] = pair.a.stage_dir.glob(f"*/{name}")
            weights = copy / "adapter_model.safetensors"
            for path in (copy, weights):
                path.chmod(0o700)  # they are read-only
            if damage == "removed":
                shutil.rmtree(copy)
            else:
                os.truncate(weights, 1000)
            assert {one: pair.a.answer(one) for one in NAMES} == answers
    assert pair.a.engine.alive


def test_a_replica_that_never_staged_them(pair: Pair[Replica], answers: dict[str, str]) -> None:
    """Where there is no copy the request gets an error, and the others are served."""
    for name in ("first", "second"):
        with pytest.raises(openai.APIStatusError):
            pair.b.answer(name)
    for name in ("third", "fourth"):
        assert pair.b.answer(name) == answers[name]
    assert pair.b.engine.alive
