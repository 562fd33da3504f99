"""From the registration's acknowledgement to ``/v1/models`` of every sidecar; and back.

16 sidecars on one folder of a local filesystem, asked one after the other, each until it answers
with the change: the poller's own time is in the figure, and it leaves the others their CPU. The
next change waits until the fleet is at rest.
Goal: p99 at most 100 ms, for registering and for unregistering.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, table
from fleet import sidecars
from population import populate, register, unregister
from stub_engine import stub_engine

from lora_fs.demo.tiny_llama import ensure_model, make_adapter

GIVE_UP_S = 10.0
REST_S = 0.5


async def seen_by(session: aiohttp.ClientSession, url: str, name: str, *, present: bool) -> float:
    """Ask one sidecar until it lists ``name`` (or no longer does); returns when it did."""
    needle = f'"id": "{name}"'.encode()
    started = time.monotonic()
    while True:
        async with session.get(f"{url}/v1/models") as answer:
            if (needle in await answer.read()) is present:
                return time.monotonic()
        if time.monotonic() - started > GIVE_UP_S:
            raise RuntimeError(f"{url} does not follow")
        await asyncio.sleep(0.002)


async def measure(urls: list[str], work: Path, rounds: int, registered: int) -> None:
    """Register and unregister one adapter after the other."""
    folder = make_adapter(work / "tiny", work / "a1", 1)
    registry = populate(work / "volume", work / "a0", registered)
    calls: dict[str, list[float]] = {"register": [], "unregister": []}
    last: dict[str, list[float]] = {"register": [], "unregister": []}
    async with aiohttp.ClientSession() as session:
        for url in urls:
            await seen_by(session, url, f"many-{registered - 1:05d}", present=True)
        for number in range(rounds):
            name = f"new-{number:04d}"
            for what, present in (("register", True), ("unregister", False)):
                await asyncio.sleep(REST_S)
                started = time.monotonic()
                if present:
                    await asyncio.to_thread(register, registry, name, folder)
                else:
                    await asyncio.to_thread(unregister, registry, name)
                acknowledged = time.monotonic()
                for url in urls:
                    seen = await seen_by(session, url, name, present=present)
                calls[what].append(1000 * (acknowledged - started))
                last[what].append(1000 * (seen - acknowledged))
    rows = [(f"{what}: the call itself", values) for what, values in calls.items()]
    rows += [(f"{what} acknowledged → all {len(urls)} lists", values) for what, values in last.items()]
    table(rows, "ms")


def main() -> None:
    """Start the sidecars, then measure."""
    options = arguments(__doc__ or "", sidecars=16, rounds=200, registered=100)
    heading(f"Registering, seen by {options.sidecars} sidecars with {options.registered} adapters")
    with tempfile.TemporaryDirectory() as folder, stub_engine(Path(folder) / "stub.log") as engine:
        work = Path(folder)
        make_adapter(ensure_model(work / "tiny"), work / "a0", 0)
        with sidecars(options.sidecars, work / "volume", engine, work) as running:
            urls = [process.url for process in running]
            asyncio.run(measure(urls, work, options.rounds, options.registered))


if __name__ == "__main__":
    main()
