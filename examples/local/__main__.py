"""``lora-fs demo``: run the story in a folder, clean up after it, exit 0 only if it all held.

Owns the folders and the processes of a run: they end with it, unless ``--keep`` holds the
replicas up until Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import httpx
import openai

from lora_fs.demo import one_address, stall
from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.failures import DemoFailed
from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PROMPT, PluginReplica, Replica, SidecarReplica
from lora_fs.demo.story import Story, boot, make_adapters
from lora_fs.demo.transcript import Transcript
from lora_fs.demo.volume import LORA_FS

_INTERRUPTED = 130
_QUESTION = {"model": "support", "prompt": PROMPT, "max_tokens": 8}


def main() -> int:
    """Show lora-fs at work: two real vLLM replicas that agree through one shared folder."""
    parser = argparse.ArgumentParser(prog="lora-fs demo", description=main.__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the replicas running until Ctrl-C")
    parser.add_argument(
        "--dir",
        type=Path,
        help="keep the model and the adapters here for the next run (default: a temporary folder)",
    )
    parser.add_argument(
        "--sidecar", action="store_true", help="stock engines with sidecars, instead of the plugin"
    )
    options = parser.parse_args()
    work_dir: Path = (options.dir or Path(tempfile.mkdtemp(prefix="lora-fs-demo-"))).resolve()
    work_dir.mkdir(parents=True, exist_ok=True)
    run_dir = Path(tempfile.mkdtemp(prefix="run-", dir=work_dir))
    out = Transcript()
    exit_code = 0
    try:
        _run(work_dir, run_dir, out, SidecarReplica if options.sidecar else PluginReplica, keep=options.keep)
    except (DemoFailed, openai.OpenAIError, httpx.HTTPError) as error:
        out.failed(f"{type(error).__name__}: {error}")
        out.say(f"The logs are in {run_dir}")
        return 1
    except KeyboardInterrupt:
        exit_code = _INTERRUPTED
    shutil.rmtree(run_dir if options.dir else work_dir)
    return exit_code


def _run(work_dir: Path, run_dir: Path, out: Transcript, kind: type[Replica], *, keep: bool) -> None:
    """Tell the whole story, then end what it started, or hold it first."""
    out.title("lora-fs: put an adapter on the shared volume once, and every replica serves it")
    with EngineFarm(run_dir) as farm:
        model_dir = make_adapters(work_dir, out)
        with closing(boot(farm, model_dir, run_dir, out, kind)) as pair:
            Story(pair, out).tell()
            one_address.show(pair, model_dir, run_dir, out)
            if kind is PluginReplica:
                stall.show(farm, run_dir, out)
            out.finished()
            if keep:
                _hold(pair, out)


def _hold(pair: Pair[Replica], out: Transcript) -> None:
    """Say how to go on in another terminal, and keep everything up until Ctrl-C."""
    out.say("\nBoth replicas stay up. In another terminal:")
    for name, value in pair.volume.env.items():
        out.command(f"export {name}={shlex.quote(value)}")
    out.command(f"{shlex.quote(LORA_FS)} status")
    for replica in pair.both:
        out.say(f"replica {replica.name}: {replica.url}")
        out.command(f"curl {replica.url}/v1/models")
        out.command(shlex.join(["curl", f"{replica.url}/v1/completions", "--json", json.dumps(_QUESTION)]))
    out.say(f"adapters to register: {pair.volume.cwd / 'adapters'}")
    out.say("Ctrl-C ends it.")
    with suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
