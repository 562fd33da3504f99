"""``/v1/models`` with 1,000 adapters: the sidecar, and vLLM itself with as many loaded at runtime.

One real vLLM. Its own list is what it loaded; the sidecar's is what the volume holds. Both are
asked in turns over kept connections. Goal: at most 10 ms at the sidecar.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval, table
from population import populate

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import SidecarReplica
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import Volume


class Client:
    """One kept connection to one server's list."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    def list(self) -> tuple[set[str], float]:
        """Returns the names, and the seconds until the whole body was there."""
        started = time.perf_counter()
        self._connection.request("GET", "/v1/models")
        body = self._connection.getresponse().read()
        seconds = time.perf_counter() - started
        return {card["id"] for card in json.loads(body)["data"]}, seconds


def main() -> None:
    """Fill both lists, compare, then time in turns."""
    options = arguments(__doc__ or "", adapters=1000, rounds=300)
    heading(f"/v1/models with {options.adapters} adapters")
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder)) as farm:
        work = Path(folder)
        model = ensure_model(work / "tiny")
        adapter = make_adapter(model, work / "a0", 0)
        populate(work / "volume", adapter, options.adapters)
        replica = SidecarReplica("a", farm, model, Volume(work / "volume", "tiny", cwd=work), work)
        peer = farm.start("peer", model)
        replica.wait_ready()
        peer.wait_ready()
        names = [f"many-{number:05d}" for number in range(options.adapters)]
        with httpx.Client(base_url=peer.url, timeout=60) as http:
            for name in names:
                body = {"lora_name": name, "lora_path": str(adapter)}
                http.post("/v1/load_lora_adapter", json=body).raise_for_status()
        clients = {"vLLM": Client(peer.url), "sidecar": Client(replica.url)}
        for client in clients.values():
            assert client.list()[0] == {"tiny", *names}
        samples: dict[str, list[float]] = {name: [] for name in clients}
        for _ in range(options.rounds):
            for name in random.sample(sorted(clients), 2):
                samples[name].append(1000 * clients[name].list()[1])
        table([*samples.items()], "ms")
        ratios = [s / v for s, v in zip(samples["sidecar"], samples["vLLM"], strict=True)]
        low, high = interval(ratios)
        print(f"sidecar / vLLM: {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}, 95 %)")
        replica.close()


if __name__ == "__main__":
    main()
