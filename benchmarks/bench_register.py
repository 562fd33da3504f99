"""Registering an adapter of 336 MB, beside `cp -r`, `sync` and `sha256sum` of it, in turns in one run.

Goal: at most as long as those three. What is compared does the same work: the files are copied, their copy
survives a power loss, and their hashes are known; registering also reads each weight for NaN and zeros, and
writes the record, the pointer and HEAD. Correctness first: the hashes on record are those of `sha256sum`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from bench_folder_drop import write_adapter
from figures import arguments, heading, table
from population import register

from lora_fs.sidecar.registry.store.writer import Registry

RANK = 160  # 336 MB: every attention projection of a 7B model
BY_HAND = {  # coreutils may hash without the processor's instructions for it; openssl uses them
    "cp -r, sync, sha256sum": ("sha256sum",),
    "cp -r, sync, openssl sha256": ("openssl", "dgst", "-sha256", "-r"),
}
FILES = ("adapter_config.json", "adapter_model.safetensors")


def by_hand(source: Path, target: Path, hashing: Sequence[str]) -> dict[str, str]:
    """Copy, sync and hash with the system's own programs; returns the hashes."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    copies = [str(target / name) for name in FILES]
    subprocess.run(["sync", *copies, str(target)], check=True)
    told = subprocess.run([*hashing, *copies], check=True, capture_output=True, text=True).stdout
    return {
        Path(path.lstrip("*")).name: digest for digest, path in (line.split() for line in told.splitlines())
    }


def main() -> None:
    """Take turns; each round has fresh folders on the same filesystem."""
    options = arguments(__doc__ or "", rounds=7)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        size = write_adapter(work / "big", 0, rank=RANK)
        heading(f"An adapter of {size / 1e6:.0f} MB registered, {options.rounds} rounds in turns")
        registry = Registry(work / "root", create=True)
        write_adapter(work / "small", 1, rank=1)
        register(registry, "warm", work / "small")
        took: dict[str, list[float]] = {name: [] for name in (*BY_HAND, "register")}
        for number in range(options.rounds):
            for name, hashing in BY_HAND.items():
                os.sync()  # what was removed and written before is not waited for by either
                begun = time.monotonic()
                hashes = by_hand(work / "big", work / "copy", hashing)
                took[name].append(time.monotonic() - begun)
                shutil.rmtree(work / "copy")
            os.sync()
            begun = time.monotonic()
            record = register(registry, f"big-{number}", work / "big").record
            took["register"].append(time.monotonic() - begun)
            assert {one.path: one.sha256 for one in record.spec.files} == hashes
            shutil.rmtree(registry.layout.artifact(record.key))
        registry.close()
        table(list(took.items()), "s")
        for name in BY_HAND:
            ratios = [one / other for one, other in zip(took["register"], took[name], strict=True)]
            print(f"register / {name}: median of the rounds {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
