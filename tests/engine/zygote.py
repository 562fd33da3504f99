"""The demo's pre-imported vLLM, with ``vllm serve``'s several API servers besides.

A script, started in place of ``examples/local/zygote.py`` and spoken to alike. An engine whose
arguments name ``--api-server-count`` runs what ``vllm serve`` runs for it. One thing is changed:
vLLM spawns those API servers, which imports everything again; here they are forked. An engine with
``OTHER_VERSION`` in its environment says that it is of that version.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import traceback
from importlib import import_module
from typing import Any

from lora_fs.demo import zygote

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
    from vllm.entrypoints.cli.serve import run_multi_api_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    vllm.v1.utils.multiprocessing = ForkingMultiprocessing()
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    try:
        run_multi_api_server(args)
    except ValueError:
        traceback.print_exc()
        raise


def main() -> None:
    """Import, then fork a server for every line."""
    import vllm

    os.register_at_fork(after_in_child=zygote.follow_parent)
    import_module(SERVE)
    zygote.preload()
    from vllm.entrypoints.launchers.api_server import entry

    run_one = entry.main

    def run() -> None:
        vllm.__version__ = os.environ.get("OTHER_VERSION", vllm.__version__)
        if "--api-server-count" in sys.argv:
            run_several()
        else:
            run_one()

    entry.main = run
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    zygote.answer(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
