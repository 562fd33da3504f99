"""How long short commands take, beside the interpreter's own start.

Each is a process of its own; the figures are medians of the wall clock and of the processor's time, which
a busy machine distorts less. The interpreter alone (``python -c pass``) is the baseline: it says how fast the
machine is.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading
from population import populate

from lora_fs.demo.tiny_llama import ensure_model, make_adapter

LORA_FS = str(Path(sys.executable).with_name("lora-fs"))


def medians_ms(words: list[str], environment: dict[str, str], rounds: int) -> tuple[float, float]:
    """Medians of wall clock and processor, in ms; the first run, which fills the page cache, is left out."""
    wall, processor = [], []
    for _ in range(rounds + 1):
        began, used = time.perf_counter(), _used_s()
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
        wall.append(1000 * (time.perf_counter() - began))
        processor.append(1000 * (_used_s() - used))
    return statistics.median(wall[1:]), statistics.median(processor[1:])


def _used_s() -> float:
    """The processor's time that ended children have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    options = arguments(__doc__ or "", count=100, rounds=20)
    heading("Short commands", ("lora-fs", "click", "pydantic"))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "registry"
        adapter = make_adapter(ensure_model(Path(folder) / "tiny"), Path(folder) / "adapter", 0)
        populate(root, adapter, options.count).close()
        environment = {**os.environ, "LORA_FS_ROOT": str(root), "LORA_FS_MODEL": "tiny"}
        rows = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "python -c 'import click'": [sys.executable, "-c", "import click"],
            "lora-fs --help": [LORA_FS, "--help"],
            "lora-fs version": [LORA_FS, "version"],
            f"lora-fs list, of {options.count} adapters": [LORA_FS, "list"],
            "lora-fs show many-00000": [LORA_FS, "show", "many-00000"],
            "lora-fs status": [LORA_FS, "status"],
            "lora-fs unregister many-00000 --dry-run": [LORA_FS, "unregister", "many-00000", "--dry-run"],
        }
        print(f"{'':<40}  wall ms  processor ms")
        for name, words in rows.items():
            wall, processor = medians_ms(words, environment, options.rounds)
            print(f"{name:<40} {wall:8.0f} {processor:13.0f}", flush=True)


if __name__ == "__main__":
    main()
