"""The demo's pre-imported vLLM, with ``vllm serve``'s several API servers besides.

A script, started in place of ``examples/local/zygote.py`` and spoken to alike. An engine whose
arguments name ``--api-server-count`` runs what ``vllm serve`` runs for it. One thing is changed:
vLLM spawns those API servers, which imports everything again; here they are forked. An engine with
``OTHER_VERSION`` in its environment says that it is of that version. One with ``SHARES_BLOCKS`` is a fork in
which all adapters share prefix blocks. One with ``FAULTS``, a folder, loads no adapter while a file there
has its data-parallel rank for a name; what it says is the reason. A tensor-parallel rank ends no load while
``slow-RANK`` is there, and fills no slot while ``fill-RANK`` is. One with ``JOINS_THREADS`` waits at its end
for its threads, as a Python that was not forked does. One with ``SCRIPT`` is no server: it runs that file,
with the arguments beside it.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from lora_fs.demo import zygote
from lora_fs.worker_patch.worker import hooks

SERVE = "vllm.entrypoints.cli.serve"


class ForkingMultiprocessing:
    """The module ``multiprocessing`` whose processes are forked, whatever is asked for."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)

    def get_context(self, method: str | None = None) -> Any:
        return multiprocessing.get_context("fork")


def run_several() -> None:
    """Do what the command does with ``--api-server-count 2``; its error goes to the log."""
    import vllm.v1.utils
    from vllm.entrypoints.cli.serve import make_arg_parser, run_multi_api_server, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    vllm.v1.utils.multiprocessing = ForkingMultiprocessing()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    try:
        run_multi_api_server(args)
    except ValueError:
        traceback.print_exc()
        raise


def fail_as_told(faults: Path) -> None:
    """Have the engines of this server fail in the thread that reads an adapter, or in the step."""
    install = hooks.install

    def install_faults() -> None:
        install()
        from vllm.distributed import get_tensor_model_parallel_rank

        from lora_fs.worker_patch.worker.managers import TieredWorkerManager
        from lora_fs.worker_patch.worker.models import TieredModelManager

        fill = TieredModelManager._fill
        begin, prepare = TieredWorkerManager.__init__, TieredWorkerManager._prepare

        def begin_with_rank(self: Any, vllm_config: Any, *args: Any, **more: Any) -> None:
            self.fault = faults / str(vllm_config.parallel_config.data_parallel_index)
            begin(self, vllm_config, *args, **more)

        def prepare_or_fail(self: Any, request: Any, **how: Any) -> Any:
            while (faults / f"slow-{get_tensor_model_parallel_rank()}").exists():
                time.sleep(0.005)
            if self.fault.exists():
                raise OSError(self.fault.read_text())
            return prepare(self, request, **how)

        def fill_or_fail(self: Any, *args: Any) -> None:
            fault = faults / f"fill-{get_tensor_model_parallel_rank()}"
            if fault.exists():
                raise OSError(fault.read_text())
            fill(self, *args)

        models: Any = TieredModelManager
        models._fill = fill_or_fail
        manager: Any = TieredWorkerManager
        manager.__init__, manager._prepare = begin_with_rank, prepare_or_fail

    hooks.install = install_faults


def main() -> None:
    """Import, then fork a server for every line."""
    import vllm

    os.register_at_fork(after_in_child=zygote.follow_parent)
    import_module(SERVE)
    zygote.preload()
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.core import kv_cache_utils

    run_one = entry.main

    def run() -> None:
        vllm.__version__ = os.environ.get("OTHER_VERSION", vllm.__version__)
        if "SHARES_BLOCKS" in os.environ:
            # With the parameters of vLLM's: what it does tells.
            right = kv_cache_utils.generate_block_hash_extra_keys
            kv_cache_utils.generate_block_hash_extra_keys = functools.wraps(right)(lambda *_: (None, 0))
        if "FAULTS" in os.environ:
            fail_as_told(Path(os.environ["FAULTS"]))
        try:
            if "SCRIPT" in os.environ:
                sys.argv = json.loads(os.environ["SCRIPT"])
                runpy.run_path(sys.argv[0], run_name="__main__")
            elif "--api-server-count" in sys.argv:
                run_several()
            else:
                run_one()
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            if "JOINS_THREADS" in os.environ:
                threading._shutdown()  # type: ignore[attr-defined]
                print("THREADS JOINED", flush=True)

    entry.main = run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    zygote.answer(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
