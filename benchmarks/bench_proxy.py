"""What the proxy adds: the same request to the engine and through its sidecar, in turns.

One real vLLM with one adapter loaded. Plain completions are timed to the last byte; streamed
ones to the first event and to the last. Answers are compared before anything is timed.
Goal: at most 2 ms at the median.
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

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT, SidecarReplica
from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.demo.volume import Volume

TOKENS = 8


class Client:
    """One kept connection, and nothing between its bytes and the clock."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)

    def complete(self, *, stream: bool) -> tuple[str, float, float]:
        """Returns the text, and the seconds to the first and to the last byte of the body."""
        request = {"model": self._model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
        started = time.perf_counter()
        headers = {"content-type": "application/json"}
        self._connection.request(
            "POST", "/v1/completions", json.dumps({**request, "stream": stream}), headers
        )
        answer = self._connection.getresponse()
        first = answer.read1(65536)
        at_first = time.perf_counter() - started
        body = first + answer.read()
        at_last = time.perf_counter() - started
        if answer.status != 200:
            raise RuntimeError(body.decode())
        if not stream:
            return json.loads(body)["choices"][0]["text"], at_first, at_last
        events = [line[6:] for line in body.decode().splitlines() if line.startswith("data: {")]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events), at_first, at_last


def held_by(engine_url: str) -> list[str]:
    """Return the engine's own names of the adapters that it holds."""
    cards = httpx.get(f"{engine_url}/v1/models", trust_env=False).raise_for_status().json()["data"]
    return [card["id"] for card in cards if card["id"] != "tiny"]


def main() -> None:
    """Start one replica, compare, then time in turns."""
    options = arguments(__doc__ or "", rounds=400)
    heading("What the proxy adds")
    with tempfile.TemporaryDirectory() as folder, EngineFarm(Path(folder)) as farm:
        work = Path(folder)
        model = ensure_model(work / "tiny")
        volume = Volume(work / "volume", "tiny", cwd=work)
        volume.run("init")
        replica = SidecarReplica("a", farm, model, volume, work)
        replica.wait_ready()
        volume.run("register", "a0", str(make_adapter(model, work / "adapters" / "a0", 0)), "--wait", "20")
        replica.answer("a0")
        (loaded,) = held_by(replica.engine_url)
        clients = {"engine": Client(replica.engine_url, loaded), "sidecar": Client(replica.url, "a0")}
        samples: dict[str, list[float]] = {}
        for stream, measures in ((False, ("answer",)), (True, ("first event", "last event"))):
            texts = {name: client.complete(stream=stream)[0] for name, client in clients.items()}
            assert len(set(texts.values())) == 1, texts
            for _ in range(options.rounds):
                for name in random.sample(sorted(clients), 2):
                    _, first, last = clients[name].complete(stream=stream)
                    times = (first, last) if stream else (last,)
                    for measure, seconds in zip(measures, times, strict=True):
                        samples.setdefault(f"{measure}: {name}", []).append(1000 * seconds)
        table([*samples.items()], "ms")
        print("| added by the proxy | median ms | 95 % interval | ratio of medians |\n|---|---|---|---|")
        for measure in ("answer", "first event", "last event"):
            direct, through = samples[f"{measure}: engine"], samples[f"{measure}: sidecar"]
            added = [b - a for a, b in zip(direct, through, strict=True)]
            low, high = interval(added)
            ratio = statistics.median(through) / statistics.median(direct)
            print(f"| {measure} | {statistics.median(added):.2f} | {low:.2f} to {high:.2f} | {ratio:.3f} |")
        replica.close()


if __name__ == "__main__":
    main()
