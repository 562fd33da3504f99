"""How long short commands take, beside the interpreter's own start.

Each is a process of its own, run in turns with the others. The figures are medians of the wall clock and of
the processor's time, and the least of the latter, which a busy machine distorts least. The interpreter
alone (``python -c pass``) is the baseline: it says how fast the machine is. Bytecode is there, as of a
package that is installed.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading
from population import populate

from lora_fs.demo.tiny_llama import ensure_model, make_adapter

LORA_FS = str(Path(sys.executable).with_name("lora-fs"))


@dataclass
class Taken:
    """What the runs of one command took, in ms."""

    wall_ms: list[float] = field(default_factory=list)
    processor_ms: list[float] = field(default_factory=list)

    def run(self, words: list[str], environment: dict[str, str]) -> None:
        """Run the command once more."""
        began, used = time.perf_counter(), _used_s()
        subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
        self.wall_ms.append(1000 * (time.perf_counter() - began))
        self.processor_ms.append(1000 * (_used_s() - used))


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
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",  # an installed package has its bytecode
            "LORA_FS_ROOT": str(root),
            "LORA_FS_MODEL": "tiny",
        }
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
        taken = {name: Taken() for name in rows}
        for round_number in range(options.rounds + 1):
            for name, words in rows.items():  # in turns: what else the machine does meets all alike
                (taken[name] if round_number else Taken()).run(words, environment)  # the first fills caches
        least = {name: min(one.processor_ms) for name, one in taken.items()}
        print(f"{'':<40} {'wall ms':>8} {'processor ms':>13} {'least':>6} {'× pass':>7}")
        for name, one in taken.items():
            wall, processor = statistics.median(one.wall_ms), statistics.median(one.processor_ms)
            times = least[name] / least["python -c pass"]
            print(f"{name:<40} {wall:8.0f} {processor:13.0f} {least[name]:6.0f} {times:7.1f}", flush=True)


if __name__ == "__main__":
    main()
