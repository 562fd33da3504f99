"""What a sidecar costs while nothing happens, with 10,000 adapters registered.

CPU time and resident memory of the process, read from /proc over the interval.
Goal: under 1 % of a core, at most 200 MB.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading
from fleet import sidecars
from population import populate
from stub_engine import stub_engine

from lora_fs.demo.tiny_llama import ensure_model, make_adapter

SETTLE_S = 5


def cpu_s(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Populate, start, settle, watch."""
    options = arguments(__doc__ or "", adapters=10_000, seconds=120)
    heading(f"Idle with {options.adapters} adapters")
    with tempfile.TemporaryDirectory() as work, stub_engine(Path(work) / "stub.log") as engine:
        folder = make_adapter(ensure_model(Path(work) / "tiny"), Path(work) / "a0", 0)
        populate(Path(work) / "volume", folder, options.adapters)
        started = time.monotonic()
        with sidecars(1, Path(work) / "volume", engine, Path(work)) as (sidecar,):
            ready_s = time.monotonic() - started
            listed = len(httpx.get(f"{sidecar.url}/v1/models").json()["data"])
            assert listed == options.adapters + 1, listed
            time.sleep(SETTLE_S)
            before, at = cpu_s(sidecar.pid), time.monotonic()
            time.sleep(options.seconds)
            used = 100 * (cpu_s(sidecar.pid) - before) / (time.monotonic() - at)
            print("| ready after | CPU, of one core | resident |\n|---|---|---|")
            print(f"| {ready_s:.1f} s | {used:.2f} % | {sidecar.rss_bytes() / 1e6:.0f} MB |")


if __name__ == "__main__":
    main()
