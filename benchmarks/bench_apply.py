"""``lora-fs apply`` of 1,000 documents with nothing to do: whole commands, and no file of the volume changed.

Goal: at most 3 s. Each document has a folder of its own, which is hashed each time. Beside it
``lora-fs list`` of the same registry: what a command takes that only reads.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, table

from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar.registry.store import marker

DOCUMENT = "---\napiVersion: lora-fs/v1\nkind: LoraAdapter\nmetadata: {name: %s}\nspec: {source: ./%s}\n"


def state(root: Path) -> dict[str, int]:
    """Every file, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


def main() -> None:
    """Register all of them by one apply, then time applies that have nothing to do."""
    options = arguments(__doc__ or "", adapters=1000, rounds=5)
    heading(f"apply of {options.adapters} documents, nothing to do")
    with tempfile.TemporaryDirectory() as folder:
        work, root = Path(folder), Path(folder, "volume")
        marker.create(root)
        adapter = make_adapter(ensure_model(work / "tiny"), work / "first", 0)
        names = [f"many-{number:05d}" for number in range(options.adapters)]
        for name in names:
            shutil.copytree(adapter, work / name)
        (work / "adapters.yaml").write_text("".join(DOCUMENT % (name, name) for name in names))
        where = ["--root", str(root), "--model", "tiny"]

        def ran(*words: str) -> float:
            started = time.perf_counter()
            subprocess.run([LORA_FS, *words, *where], check=True, stdout=subprocess.DEVNULL)
            return time.perf_counter() - started

        first = ran("apply", "-f", str(work / "adapters.yaml"))
        before = state(root)
        applied, listed = [], []
        for _ in range(options.rounds):
            applied.append(ran("apply", "-f", str(work / "adapters.yaml")))
            listed.append(ran("list"))
        assert state(root) == before, "an apply with nothing to do wrote something"
        table([("all of them new", [first]), ("nothing to do", applied), ("`list`", listed)], "s")


if __name__ == "__main__":
    main()
