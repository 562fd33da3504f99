"""Real vLLM API servers on the CPU, forked in about two seconds each.

Owns how a vLLM is started for the demo and the tests: its arguments, its environment, and
the pre-imported process (``zygote.py``) that the servers are forked from. These are stock
engines unless ``PLUGIN_ENV`` is given; nothing else changes what vLLM does.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM
from types import TracebackType
from typing import Self

from lora_fs.demo.process import Process, ProcessFailed, free_port, spawn
from lora_fs.demo.tiny_llama import CONTEXT, RANKS

MAX_LORAS = 2
MAX_CPU_LORAS = 4
_ZYGOTE = Path(__file__).with_name("zygote.py")

ENGINE_ENV: Mapping[str, str] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # Longer than a client keeps a connection without a request. Both httpx and vLLM end it after 5 s:
    # a request may be sent on a connection that is closed by then.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
    # The engine core's worker stays in its process, and one thread does not spin on a
    # machine of two cores.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

# What makes it one with lora-fs's plugin, which this machine may change; the registry's place comes on top.
PLUGIN_ENV: Mapping[str, str] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_PLUGINS": "lora_fs",
    "LORA_FS_INSECURE": "1",
}

# vLLM's own way on a CPU: the worker in a process of its own, its threads bound to processors.
WORKER_APART: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "auto",
}


def engine_args(model_dir: Path, port: int) -> list[str]:
    """vLLM's arguments; the model is served under its folder's name.

    float32 because CPUs without bf16 instructions are three times slower with it.
    """
    options = {
        "--model": model_dir,
        "--served-model-name": model_dir.name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": CONTEXT,
        "--kv-cache-memory-bytes": 64 * 2**20,
        "--max-loras": MAX_LORAS,
        "--max-cpu-loras": MAX_CPU_LORAS,
        "--max-lora-rank": max(RANKS),
    }
    flags = ["--enable-lora", "--enforce-eager"]
    return [str(part) for option in options.items() for part in option] + flags


class EngineFarm:
    """Starts engines from one pre-imported process, and ends them all on ``close``.

    The import begins at once, in the background; the first ``start`` waits for it.

    Args:
        log_dir: gets ``zygote.log`` and ``<name>.log`` per engine.
        python: the interpreter whose vLLM it is; a stock engine's needs nothing of lora-fs.
    """

    def __init__(self, log_dir: Path, *, python: str = sys.executable) -> None:
        self._log_dir, self._python = log_dir, python
        self._engines: list[Process] = []
        self._control, theirs = socket.socketpair()
        with theirs:
            self._zygote = spawn(
                "the import of vLLM",
                [python, "-P", str(_ZYGOTE), str(theirs.fileno())],
                log=log_dir / "zygote.log",
                url="",
                env=ENGINE_ENV,
                pass_fds=[theirs.fileno()],
            )
        self._lines = self._control.makefile("rw")
        self._imported = False

    def wait_imported(self) -> None:
        """Wait until vLLM is imported and an engine can be forked.

        Raises:
            ProcessFailed: vLLM cannot be imported, or not in five minutes.
        """
        if not self._imported:
            self._receive(timeout_s=300)  # 20 s on a slow machine where nothing else runs
            self._imported = True

    def start(
        self,
        name: str,
        model_dir: Path,
        *,
        port: int | None = None,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Fork an engine; returns at once, ``wait_ready`` tells when it serves.

        Args:
            name: names its log.
            model_dir: made by ``tiny_llama.ensure_model``.
            port: a free one if not given; give the same one to restart an engine in place.
            args: more vLLM arguments; they win over ``engine_args``.
            env: environment on top of ``ENGINE_ENV``.
        """
        self.wait_imported()
        port = port or free_port()
        log = self._log_dir / f"{name}.log"
        request = {
            "args": [*engine_args(model_dir, port), *args],
            "env": dict(env or {}),
            "log": str(log),
        }
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        pid = int(self._receive(timeout_s=60)["pid"])
        return self._own(Process(name, pid, log, f"http://127.0.0.1:{port}"))

    def start_by_command(
        self,
        name: str,
        model_dir: Path,
        *,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Process:
        """Start vLLM as its users do, by its own command, with nothing pre-imported: half a minute.

        Only so does ``WORKER_APART`` bind threads: OpenMP reads where to once, as it is imported.
        """
        port = free_port()
        arguments = [*engine_args(model_dir, port), *args]
        process = spawn(
            name,
            [self._python, "-P", "-m", "vllm.entrypoints.openai.api_server", *arguments],
            log=self._log_dir / f"{name}.log",
            url=f"http://127.0.0.1:{port}",
            env={**ENGINE_ENV, **(env or {})},
            on_parent_death=SIGTERM,  # it ends its engine core itself, which SIGKILL would orphan
        )
        return self._own(process)

    def close(self) -> None:
        """End every engine, then the process they were forked from."""
        for engine in self._engines:
            engine.kill()
        self._lines.close()
        self._control.close()
        self._zygote.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _own(self, engine: Process) -> Process:
        self._engines.append(engine)
        return engine

    def _receive(self, timeout_s: float) -> dict[str, int]:
        self._control.settimeout(timeout_s)
        try:
            line = self._lines.readline()
        except TimeoutError as error:
            raise ProcessFailed(self._zygote, f"did not answer in {timeout_s} s") from error
        if not line:
            raise ProcessFailed(self._zygote, "ended")
        answer: dict[str, int] = json.loads(line)
        return answer
