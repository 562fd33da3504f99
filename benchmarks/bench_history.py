"""A registry with a long history beside a fresh one with the same adapters: what a reader and a writer pay.

In the one adapters came and went, whose files gc had removed, and a name was promoted time and again; then
gc ran as if all of it were old. The other never had them. Both are read and written in turns, by new
processes. Goal: at most 1.2 times.
"""

from __future__ import annotations

import json
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import arguments, heading, interval
from population import SCOPE, populate, register, unregister

from lora_fs.demo.tiny_llama import ensure_model, make_adapter
from lora_fs.sidecar.model import AdapterKey
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.registry.maintenance import garbage, gc
from lora_fs.sidecar.registry.store.reader import Series
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

READER = Path(__file__).parent / "scale" / "reader.py"
GOAL = 1.2


def collect(registry: Registry) -> None:
    """Run gc, as if all were old, until it finds nothing."""
    registry.close()
    while found := gc.find(registry, SCOPE, frozenset(), 0.0, history_s=0.0):
        refused = garbage.collect(found)
        assert not refused, refused


def churn(registry: Registry, adapter: Path, went: int, promotions: int) -> None:
    """Leave what so many adapters leave that came and went, and what so many promotions of one name do.

    The first is registered and withdrawn for real, and its files are removed as gc does. Its records are
    copied for the others, each sealed anew.
    """
    register(registry, "went-00000", adapter)
    unregister(registry, "went-00000")
    key = AdapterKey(*SCOPE, "v1", "went-00000")
    shutil.rmtree(registry.layout.artifact(key))
    series: list[Series[Any]] = [registry.records(key), registry.pointers(SCOPE, key.name)]
    bodies = [(one, registry.read(one, number)) for one in series for number in registry.generations(one)]
    for number in range(1, went):
        name = f"went-{number:05d}"
        for one, body in bodies:
            data = seal(body.model_copy(update={"name": name, "token": secrets.token_hex(16)}))
            (one.folder / generation_name(name, body.generation)).write_bytes(data)
    pointers = registry.pointers(SCOPE, "many-00000")
    top, pointer = registry.latest(pointers)
    assert pointer is not None
    for number in range(top.generation + 1, top.generation + 1 + promotions):
        moved = {"generation": number, "revision": f"v{1 + number % 2}", "token": secrets.token_hex(16)}
        data = seal(pointer.model_copy(update=moved))
        (pointers.folder / generation_name("many-00000", number)).write_bytes(data)
    release.promote(registry, SCOPE, "many-00000", "v1", writer="benchmark")
    registry.announce()


def read(root: Path) -> dict[str, float]:
    """What a new process pays for a cold start, and for one look at the whole tree."""
    told = [{"do": "open", "scopes": [list(SCOPE)]}, {"do": "search"}]
    ran = subprocess.run(
        [sys.executable, str(READER), str(root)],
        input="".join(json.dumps(one) + "\n" for one in told),
        capture_output=True,
        text=True,
        check=True,
    )
    cold, look = (json.loads(line) for line in ran.stdout.splitlines())
    return {
        "cold start, ms": 1000 * cold["s"],
        "cold start, calls": calls(cold),
        "memory, MB": cold["bytes"] / 1e6,
        "a look at the tree, ms": 1000 * look["s"],
        "a look at the tree, calls": calls(look),
        "a look at the tree, names": look["calls"]["names"],
    }


def calls(told: dict[str, Any]) -> float:
    """System calls; what else is counted beside them is none."""
    beside = {"read_bytes", "written_bytes", "names"}
    return float(sum(count for what, count in told["calls"].items() if what not in beside))


def write(root: Path, adapter: Path, names: Iterable[str]) -> float:
    """The median of a registration, in ms. What was registered is taken away again, history included."""
    registry, took = Registry(root), []
    names = list(names)
    for name in names:
        began = time.perf_counter()
        register(registry, name, adapter)
        took.append(1000 * (time.perf_counter() - began))
    for name in names:
        unregister(registry, name)
    collect(registry)
    return statistics.median(took)


def there(root: Path) -> list[str]:
    """Every adapter's files, records and pointers; generations left out."""
    paths = (str(path.relative_to(root)) for path in root.glob("*/*/*/*"))
    return sorted(path.partition(".@")[0] for path in paths)


def main() -> None:
    """Make both, compare what is in them, then measure in turns."""
    options = arguments(__doc__ or "", live=500, went=5000, promotions=5000, rounds=11, registrations=15)
    heading(f"{options.live} adapters, after {options.went} that went and {options.promotions} promotions")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = ensure_model(work / "tiny")
        adapters = [make_adapter(model, work / f"a{seed}", seed) for seed in range(2)]
        fresh, old = work / "fresh", work / "old"
        registry = populate(old, adapters[0], options.live)
        register(registry, "many-00000", adapters[1])
        release.promote(registry, SCOPE, "many-00000", "v1", writer="benchmark")
        registry.close()
        shutil.copytree(old, fresh, symlinks=True)
        began = time.monotonic()
        churn(registry, adapters[0], options.went, options.promotions)
        before = read(old)
        made = time.monotonic()
        collect(registry)
        collect(Registry(fresh))
        took = time.monotonic() - made
        print(f"The history was made in {made - began:.0f} s, gc took {took:.0f} s.\n", flush=True)
        assert there(old) == there(fresh), "they have not the same adapters"
        samples: dict[str, list[tuple[float, float]]] = {}
        for number in range(options.rounds):
            names = [f"new-{number}-{one}" for one in range(options.registrations)]
            turns = [(old, 0), (fresh, 1)] if number % 2 else [(fresh, 1), (old, 0)]
            taken: dict[int, dict[str, float]] = {}
            for root, which in turns:
                taken[which] = read(root) | {"a registration, ms": write(root, adapters[1], names)}
            for what in taken[0]:
                samples.setdefault(what, []).append((taken[0][what], taken[1][what]))
        print("| | fresh | with a history | ratio, 95 % | before gc |\n|---|---|---|---|---|")
        worst = 0.0
        for what, pairs in samples.items():
            ratios = [mine / theirs for mine, theirs in pairs]
            low, high = interval(ratios)
            ratio = statistics.median(ratios)
            worst = max(worst, ratio)
            ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
            once = f"{before[what]:.1f}" if what in before else ""
            print(f"| {what} | {theirs:.1f} | {ours:.1f} | {ratio:.3f} ({low:.3f} to {high:.3f}) | {once} |")
        print(f"\nThe worst ratio is {worst:.3f}; the goal is {GOAL}.")


if __name__ == "__main__":
    atomic.UNLINK_AFTER_S = 0.0  # the pause for NFS, which a run of gc over all would meet each time
    main()
