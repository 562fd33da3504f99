"""The demo's pre-imported vLLM, that runs Model Runner V2: what a GPU has by default, here on the CPU.

A script, started in place of ``examples/local/zygote.py`` and spoken to alike. V2 needs Triton with a
backend, and the CPU's is not published: vLLM is told that there is one, and Triton's interpreter runs
V2's own kernels.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

from lora_fs.demo import zygote


def main() -> None:
    """Import, then fork a server for every line."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    cast("dict[str, Any]", backends)["cpu"] = SimpleNamespace(driver=driver, compiler=None)
    os.register_at_fork(after_in_child=zygote.follow_parent)
    import_module("vllm.v1.worker.cpu.model_runner")
    zygote.preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    zygote.answer(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
