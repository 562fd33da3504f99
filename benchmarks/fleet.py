"""Sidecars as processes, as in as many pods, on one folder; their engine is shared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from lora_fs.demo.process import Process, free_port, spawn
from lora_fs.demo.volume import LORA_FS


@contextlib.contextmanager
def sidecars(count: int, root: Path, engine_url: str, run_dir: Path, *args: str) -> Iterator[list[Process]]:
    """Start ``count`` of them and wait until each is ready."""
    processes = []
    try:
        for number in range(count):
            port = free_port()
            options = {
                "--engine": engine_url,
                "--host": "127.0.0.1",
                "--port": str(port),
                "--replica-id": f"r{number:02d}",
                "--stage-dir": str(run_dir / f"stage-{number:02d}"),
            }
            arguments = [part for option in options.items() for part in option]
            processes.append(
                spawn(
                    f"sidecar-{number:02d}",
                    [LORA_FS, "sidecar", *arguments, *args],
                    log=run_dir / f"sidecar-{number:02d}.log",
                    url=f"http://127.0.0.1:{port}",
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
