"""How long short commands take, beside the interpreter's own start.

Each is a process of its own; the figure is the median of the wall clock. The interpreter alone
(``python -c pass``) is the baseline: what a command takes besides depends on the machine.
"""

from __future__ import annotations

import os
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


def median_ms(words: list[str], environment: dict[str, str], rounds: int) -> float:
    """The median of so many runs, in milliseconds; the first, which fills the page cache, is left out."""
    took = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
        took.append(1000 * (time.perf_counter() - began))
    return statistics.median(took[1:])


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
            f"lora-fs list, of {options.count} adapters": [LORA_FS, "list"],
        }
        for name, words in rows.items():
            print(f"{name:<40} {median_ms(words, environment, options.rounds):7.0f} ms", flush=True)


if __name__ == "__main__":
    main()
