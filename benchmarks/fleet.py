"""Sidecars as processes, as in as many pods, on one folder; their engine is shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lora_fs.demo.process import Process
from lora_fs.demo.sidecar import start_sidecar
from lora_fs.sidecar.registry.store.writer import Registry


@contextlib.contextmanager
def sidecars(count: int, root: Path, engine_url: str, run_dir: Path, *args: str) -> Iterator[list[Process]]:
    """Start ``count`` of them on a registry, which is made if there is none; wait until each is ready."""
    Registry(root, create=True).close()
    processes = []
    try:
        for number in range(count):
            own = ("--replica-id", f"r{number:02d}", "--stage-dir", str(run_dir / f"stage-{number:02d}"))
            processes.append(
                start_sidecar(
                    f"sidecar-{number:02d}",
                    engine_url,
                    *own,
                    *args,
                    log=run_dir / f"sidecar-{number:02d}.log",
                    env={"LORA_FS_ROOT": str(root), "LORA_FS_MODEL": "tiny"},
                )
            )
        for process in processes:
            process.wait_ready("/readyz", timeout_s=180)
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.stop()
