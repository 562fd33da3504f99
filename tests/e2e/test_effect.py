"""The effect probe beside a real vLLM: adapters that change nothing are found, and no good one is accused."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PROMPT, Replica
from lora_fs.demo.waiting import wait_until

GOOD, FOUND_IN_S = 20, 60.0
NULL = ("zero B", "zero A", "one that rounds to zero", "other names", "a scale of zero")


@pytest.fixture(scope="module")
def settings() -> dict[str, str]:
    """With the probe."""
    return {"settle_s": "0.5", "probe_effect": "true"}


def without_effect(source: Path, folder: Path, how: str) -> Path:
    """Write a real adapter's files anew, so that they load and change no answer."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    for name, tensor in list(weights.items()):
        if (how == "zero B" and "lora_B" in name) or (how == "zero A" and "lora_A" in name):
            tensor[...] = 0
        elif how == "one that rounds to zero" and "lora_B" in name:
            tensor *= 1e-30
        elif how == "other names":
            number = name.split(".layers.")[1].split(".")[0]
            weights[name.replace(f".layers.{number}.", f".layers.{int(number) + 77}.")] = weights.pop(name)
    if how == "a scale of zero":
        config["lora_alpha"] = 1e-30
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def accused(replica: Replica) -> set[str]:
    """Names that the replica's events say have no effect."""
    told = replica.http.get("/v1/events").raise_for_status().json()["data"]
    return {event["key"][3] for event in told if event["reason"] == "NoEffect"}


def is_accused(replica: Replica, name: str) -> bool:
    """Whether it is among them."""
    return name in accused(replica)


def test_what_changes_nothing_is_found_and_nothing_else(
    pair: Pair[Replica], adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """20 of 20 within a minute of their load, while a stream goes on; none of 20 good ones is accused."""
    null, good = [], [f"good-{seed}" for seed in range(1, GOOD + 1)]
    for number in range(GOOD):
        how = NULL[number % len(NULL)]
        folder = without_effect(adapters(21 + number), tmp_path / f"null-{number}", how)
        allow = ("--allow", "no-such-module") if how == "other names" else ()
        pair.volume.run("register", f"null-{number}", str(folder), *allow)
        null.append(f"null-{number}")
    for seed, name in enumerate(good, 1):
        pair.volume.run("register", name, str(adapters(seed)))
    pair.volume.run("wait", good[-1], "--timeout", "30s")
    ended, replica = threading.Event(), pair.a

    def streaming() -> None:
        while not ended.is_set():
            for _ in replica.openai.completions.create(
                model="tiny", prompt=PROMPT, max_tokens=64, stream=True
            ):
                pass

    stream = threading.Thread(target=streaming)
    stream.start()
    try:
        took = []
        for name in null:
            replica.answer(name)
            found = partial(is_accused, replica, name)
            took.append(wait_until(f"{name} is found", found, timeout_s=FOUND_IN_S))
        for name in good:
            replica.answer(name)
    finally:
        ended.set()
        stream.join()
    print("found after, in s:", [round(one, 1) for one in took])
    assert accused(replica) == set(null)
    metrics = replica.http.get("/metrics").text
    assert "lora_fs_adapters_without_effect" in metrics


def test_a_status_says_it(pair: Pair[Replica], adapters: Callable[[int], Path], tmp_path: Path) -> None:
    """Its reason is NoEffect while it is loaded; it is still served, and it is counted."""
    folder = without_effect(adapters(41), tmp_path / "null", "zero B")
    pair.volume.run("register", "told", str(folder), "--wait", "20")
    assert pair.b.answer("told") == pair.b.answer("tiny")

    def counted() -> bool:
        return "lora_fs_adapters_without_effect 1.0" in pair.b.http.get("/metrics").text

    wait_until("it is counted", counted, timeout_s=FOUND_IN_S)

    def told() -> bool:
        return '"NoEffect"' in pair.volume.run("status", "told", "-o", "json").stdout

    wait_until("a status file says it", told, timeout_s=FOUND_IN_S)
