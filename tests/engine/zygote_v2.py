"""The demo's pre-imported vLLM, that runs Model Runner V2: what a GPU has by default, here on the CPU.

A script, started in place of ``examples/local/zygote.py`` and spoken to alike. V2 needs Triton with a
backend, and the CPU's is not published: vLLM is told that there is one, and Triton's interpreter runs
V2's own kernels. ``FAULTS`` is as in ``zygote.py`` beside this.
vLLM turns asynchronous scheduling off on a CPU, as not required there. Who asks for it has it here.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from lora_fs.demo import zygote


def schedule_asynchronously() -> None:
    """Leave the option what it is, and say so in the log once the engine has made that scheduler."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    check, make = CpuPlatform.check_and_update_config, AsyncScheduler.__init__

    def check_alone(cls: type[Any], config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    def make_and_tell(self: Any, *args: Any, **more: Any) -> None:
        make(self, *args, **more)
        print("ASYNC SCHEDULER", flush=True)

    platform, scheduler = cast("Any", CpuPlatform), cast("Any", AsyncScheduler)
    platform.check_and_update_config = classmethod(check_alone)
    scheduler.__init__ = make_and_tell


def main() -> None:
    """Import, then fork a server for every line."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    cast("dict[str, Any]", backends)["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    os.register_at_fork(after_in_child=zygote.follow_parent)
    import_module("vllm.v1.worker.cpu.model_runner")
    zygote.preload()
    from vllm.entrypoints.launchers.api_server import entry

    fail_as_told = runpy.run_path(str(Path(__file__).with_name("zygote.py")))["fail_as_told"]
    run_one = entry.main

    def run() -> None:
        if "--async-scheduling" in sys.argv:
            schedule_asynchronously()
        if "FAULTS" in os.environ:
            fail_as_told(Path(os.environ["FAULTS"]))
        run_one()

    entry.main = run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    zygote.answer(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
