"""Import vLLM once, then fork a real API server at every request: two seconds, not thirty.

A script of its own, run by ``engine.EngineFarm``. Its interpreter need not have lora-fs; where it has, the
plugin's modules are imported too, and do nothing before ``VLLM_PLUGINS`` names it. Speaks
JSON lines over the socket whose number is its one argument: says ``{"ready": true}``, then
answers each ``{"args": […], "env": {…}, "log": "…"}`` with ``{"pid": n}``. When the other
end closes it exits, and every server and engine core dies with it.

The servers run vLLM's own ``main`` and its own code throughout. One thing is changed:
vLLM's CPU platform asks for its engine core to be spawned, which imports everything again;
here it is forked (target: ``CpuPlatform.check_and_update_config``, vLLM 0.32; delete when
vLLM lets ``VLLM_WORKER_MULTIPROC_METHOD`` stand).
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from runpy import run_module
from typing import Any

PRELOADED = (
    "transformers.models.llama",
    "vllm.lora.worker_manager",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
# Every engine of this vLLM imports these, or every one with the plugin. Older ones and other environments
# lack some. Not numba: imported before the worker begins, it makes vLLM 0.32 fail to replace Triton kernels.
PRELOADED_IF_THERE = (
    "lora_fs.worker_patch.api.endpoint",
    "lora_fs.worker_patch.worker.managers",
    "pydantic.v1",
    "uvicorn.protocols.websockets.websockets_sansio_impl",
    "vllm.entrypoints.generate.api_router",
    "vllm.entrypoints.openai.chat_completion.api_router",
    "vllm.entrypoints.openai.responses.api_router",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.engine.async_llm",
)
SERVER = "vllm.entrypoints.launchers.api_server.entry"
SERVER_BEFORE_029 = "vllm.entrypoints.openai.api_server"  # no function of it serves: it is run
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def preload() -> None:
    """Import what a CPU server of a Llama with adapters needs, and make its engine core fork."""
    gc.disable()
    try:
        import_module(SERVER)
    except ModuleNotFoundError as error:
        if not SERVER.startswith(f"{error.name}."):
            raise
        import_module(SERVER_BEFORE_029)
    for module in PRELOADED:
        import_module(module)
    for module in PRELOADED_IF_THERE:
        with suppress(ImportError):
            import_module(module)
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_then_fork(cls: type[Any], config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(check_then_fork)
    gc.freeze()  # the collector never touches the imported pages, so forks keep sharing them
    gc.enable()


def serve(args: list[str], env: dict[str, str], log: str) -> None:
    """Become an API server: its own group, its own log, its own environment."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(env)
    sys.argv = ["vllm", *args]
    if SERVER in sys.modules:
        sys.modules[SERVER].main()
    else:
        run_module(SERVER_BEFORE_029, run_name="__main__", alter_sys=True)


def follow_parent() -> None:
    """In every forked process: die when the process that forked it does."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answer(control: socket.socket) -> None:
    """Fork one server for every line until the other end closes."""
    lines = control.makefile("rw")
    lines.write(json.dumps({"ready": True}) + "\n")
    lines.flush()
    for line in lines:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.close(control.fileno())
                serve(request["args"], request["env"], request["log"])
                status = 0
            except BaseException:  # as Python itself tells it at the end of a process
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        lines.write(json.dumps({"pid": pid}) + "\n")
        lines.flush()


if __name__ == "__main__":
    os.register_at_fork(after_in_child=follow_parent)
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended servers leave no zombies
    answer(socket.socket(fileno=int(sys.argv[1])))
