"""The ground the other tests stand on: engines that answer, differ by adapter, and die."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.process import LOCAL, Process, child_environment, module_command, spawn
from lora_fs.demo.replica import PROMPT


def complete(engine: Process, model: str) -> str:
    """An answer of the engine itself."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    response = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60)
    text: str = response.raise_for_status().json()["choices"][0]["text"]
    return text


def test_adapters_of_every_rank_answer_differently(engine: Process, adapters: Callable[[int], Path]) -> None:
    """vLLM itself loads the adapters, and no two of them answer alike."""
    answers = {complete(engine, "tiny")}
    for seed in range(3):
        body = {"lora_name": f"a{seed}", "lora_path": str(adapters(seed))}
        httpx.post(f"{engine.url}/v1/load_lora_adapter", json=body, **LOCAL).raise_for_status()
        answers.add(complete(engine, f"a{seed}"))
    assert len(answers) == 4


def test_an_adapter_is_the_same_bytes_every_time(adapters: Callable[[int], Path], model_dir: Path) -> None:
    """Another process, with another hash seed, writes the same weights."""
    before = {path: path.read_bytes() for path in adapters(0).glob("adapter_*")}
    for path in before:
        path.unlink()
    out = str(model_dir.parent)
    subprocess.run(module_command("lora_fs.demo.tiny_llama", out, "--adapters", "1"), check=True)
    assert {path: path.read_bytes() for path in before} == before


def test_engines_die_with_the_program_that_started_them(model_dir: Path, tmp_path: Path) -> None:
    """After ``kill -9`` of the program nothing of vLLM is left."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from pathlib import Path
        from lora_fs.demo.engine import EngineFarm
        farm = EngineFarm(Path(sys.argv[2]))
        engine = farm.start("orphan", Path(sys.argv[1]))
        engine.wait_ready()
        print(engine.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program, model_dir, tmp_path],
        capture_output=True,
        text=True,
        env=child_environment({}),
        check=False,
    )
    assert ran.stdout, ran.stderr
    orphan = Process("orphan", int(ran.stdout), tmp_path / "orphan.log", "")
    assert orphan.wait_ended(timeout_s=60)


def test_a_process_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    """It dies with the program. The kernel's signal would come when the thread ends that forked it."""

    def start() -> Process:
        return spawn("sleeps", ["sleep", "600"], log=tmp_path / "log", url="", env={})

    with ThreadPoolExecutor(1) as pool:
        process = pool.submit(start).result()
    assert not process.wait_ended(timeout_s=1)
    process.kill()
    assert not process.alive


def test_a_killed_process_is_not_signalled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid may be another's by then."""
    process = spawn("sleeps", ["sleep", "600"], log=tmp_path / "log", url="", env={})
    process.stop()
    signalled = list[int]()
    monkeypatch.setattr(os, "killpg", lambda pid, _: signalled.append(pid))
    monkeypatch.setattr(os, "kill", lambda pid, _: signalled.append(pid))
    process.stop()
    process.kill()
    assert signalled == []
