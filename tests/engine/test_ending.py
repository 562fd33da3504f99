"""A vLLM with the plugin that is stopped while it answers, or while its volume does not: it ends."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.engine import PLUGIN_ENV, EngineFarm
from lora_fs.demo.process import LOCAL
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from tests.e2e.mounts import hanging, may_mount
from tests.engine.client import Answer, Client
from tests.engine.plugin import plugin_engine

ENDS_S = 60.0
LONG = 200  # tokens: the model's context has room for no more
MANY = 100  # answers of a request: of many seconds together
RUNNING = "vllm:num_requests_running"
HELD_S = 150.0  # longer than a request waits for its adapter

mounts = pytest.mark.skipif(not may_mount(), reason="mounting needs root and /dev/fuse")


def test_it_is_stopped_while_it_answers(
    farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """No client takes a text that is cut off for an answer: vLLM sends it with 200 and "abort"."""
    with (
        ThreadPoolExecutor(1) as threads,
        plugin_engine("answering", farm, model_dir, tmp_path) as plugin,
        httpx.Client(base_url=plugin.client.url, **LOCAL | {"timeout": HELD_S}) as http,
    ):
        plugin.register("busy", adapters(1))
        assert plugin.client.complete("busy").status == 200
        body = {"model": "busy", "prompt": [PROMPT] * MANY, "max_tokens": LONG, "ignore_eos": True}
        told = ""
        last = threads.submit(last_answer, plugin.client, body)
        wait_until("one is under way", lambda: plugin.client.metric(RUNNING) > 0, timeout_s=HELD_S)
        with (
            suppress(httpx.TransportError),
            http.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream,
        ):
            lines = stream.iter_lines()
            assert "text" in next(lines)
            plugin.client.engine.stop()
            told = "\n".join(lines)
        assert last.result().status in (None, 503)
        assert "length" not in told
        assert 'abort"' not in told
        assert plugin.client.engine.wait_ended(timeout_s=ENDS_S)


def last_answer(client: Client, body: dict[str, object]) -> Answer:
    """Ask again and again, so that the end meets a request; each answer before the last is whole."""
    while (answer := client.post("/v1/completions", body, limit_s=HELD_S)).status == 200:
        assert {choice["finish_reason"] for choice in json.loads(answer.body)["choices"]} == {"length"}
    return answer


@mounts
def test_it_is_stopped_while_requests_wait(
    farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], tmp_path: Path
) -> None:
    """They are told at once to ask another one, and the process waits for no thread that hangs."""
    settings = {"LORA_FS_STAGE_AHEAD": "off", "JOINS_THREADS": "1"}
    with (
        ThreadPoolExecutor(2) as threads,
        plugin_engine("stopped", farm, model_dir, tmp_path, **settings) as plugin,
    ):
        client, engine, source = plugin.client, plugin.client.engine, plugin.sources / "hangs"
        plugin.volume.run("register", "cold", str(adapters(1)))
        source.mkdir()
        with hanging(plugin.revision_dir / "cold"), hanging(source):
            loading = threads.submit(client.load, "hangs", source, limit_s=HELD_S)
            plugin.wait_listed("cold")
            before = client.metric("lora_fs_request_misses_total")
            asking = threads.submit(client.complete, "cold", limit_s=HELD_S)
            wait_until(
                "the request waits",
                lambda: client.metric("lora_fs_request_misses_total") > before,
                timeout_s=ENDS_S,
            )
            os.kill(engine.pid, signal.SIGTERM)
            assert engine.wait_ended(timeout_s=ENDS_S), engine.log_tail()
        for answer in (loading, asking):
            assert "this server ends" in answer.result().error["message"]
    assert "THREADS JOINED" in engine.log_text()


@mounts
def test_it_is_started_on_a_volume_that_hangs(farm: EngineFarm, model_dir: Path, tmp_path: Path) -> None:
    """It says so, and does not start."""
    root = tmp_path / "root"
    root.mkdir()
    env = {
        **PLUGIN_ENV,
        **Volume(root, MODEL_NAME, cwd=tmp_path).env,
        "LORA_FS_STAGE_DIR": str(tmp_path / "stage"),
        "LORA_FS_ENGINE_TIMEOUT_S": "1",
        "JOINS_THREADS": "1",
    }
    with hanging(root):
        engine = farm.start("started", model_dir, env=env)
        try:
            assert engine.wait_ended(timeout_s=ENDS_S), engine.log_tail()
        finally:
            engine.kill()
    assert f"{root} does not answer: the start waits for it" in engine.log_text()
    assert f"VolumeUnavailable: the registry's folder {root} did not answer in 1 s" in engine.log_text()
    assert "THREADS JOINED" in engine.log_text()
