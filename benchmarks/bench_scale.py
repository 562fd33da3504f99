"""What 100,000 adapters in 100 scopes and 200 replicas cost the replicas and the volume, and how it grows.

Real files, and the sidecar's own view, adopter and watcher in processes; engines are in memory. One registry
grows from 1 scope to 10 and to 100, of 1,000 adapters each. At each size: the cold start of a replica of one
scope and of a replica of all; a poll in which nothing happened; a look for dropped folders; changes, from the
registration to the reader that knows of it; and what a whole replica makes of a change, until its status file
tells of it. Then 200 replicas poll it, two of each scope.
Goals: one change at 100,000 costs at most 1.5 times what it costs at 1,000; cold start of 100,000 in at most
20 s and 500 MB.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "scale"))

from calls import Calls, per
from figures import arguments, heading, origin, write_json
from growth import write_plot
from population import fill, register, unregister
from small import make_adapter

from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.store.writer import Registry

READER = Path(__file__).parent / "scale/reader.py"
Told = dict[str, Any]
PROCESSES = 4
LAST_CHANGE_S = 3.0  # before a window ends, so that all see it
SETTLE_S = 0.5  # after a change, until a replica is at rest
LAST_REPORT_S = 60.0
ROWS = [
    ("cold start", "cold", "s", 1, "s"),
    ("of it CPU", "cold", "cpu_s", 1, "s"),
    ("memory for it", "cold", "bytes", 1e-6, "MB"),
    ("resident in all", "cold", "resident_bytes", 1e-6, "MB"),
    ("a poll in which nothing happened", "idle", "cpu_s", 1e6, "µs"),
    ("a look for dropped folders", "search", "cpu_s", 1e3, "ms"),
    ("a registration: time", "write", "s", 1e3, "ms"),
    ("a registration: CPU", "write", "cpu_s", 1e3, "ms"),
    ("seeing it: time", "seen", "s", 1e3, "ms"),
    ("seeing it: CPU", "seen", "cpu_s", 1e3, "ms"),
    ("a change in a scope not served: CPU", "passed over", "cpu_s", 1e6, "µs"),
]
REPLICAS = ("of a registry of one scope", "of this one, one scope", "of this one, all scopes")
OF_REPLICAS = [
    ("all that it makes of a change: CPU", "cpu_s", 1e3, "ms"),
    ("of it on the event loop", "loop_s", 1e3, "ms"),
    ("the list of models after it: CPU", "list_s", 1e3, "ms"),
    ("its bytes", "list_bytes", 1e-6, "MB"),
]


class Reader:
    """The other process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, do: str, **what: Any) -> Told:
        """Send a step, wait for what it took."""
        self.tell(do, **what)
        return self.answer()

    def tell(self, do: str, **what: Any) -> None:
        """Send a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **what}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Told:
        """Wait for what the step took."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the reader died")
        told: Told = json.loads(line)
        return told


@contextmanager
def reader(root: Path) -> Iterator[Reader]:
    """A process that reads ``root``."""
    command = [sys.executable, "-P", str(READER), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Reader(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.kill()


def scopes(count: int) -> list[Scope]:
    """Tenants of one base model."""
    return [Scope(f"tenant-{number:03d}", "tiny") for number in range(count)]


class Bench:
    """One registry, and this process, which writes to it."""

    def __init__(self, root: Path, source: Path, per_scope: int, rounds: int) -> None:
        self.registry = Registry(root, create=True)
        self.calls = Calls(str(root))
        self.calls.install()
        self._source, self._per_scope, self._rounds = source, per_scope, rounds
        self._small, self._stages = Registry(root.with_name("small"), create=True), root.with_name("stages")
        fill(self._small, scopes(1)[0], source, per_scope, own_bytes=True)
        self._filled = self._names = 0

    def grow(self, count: int) -> None:
        """Fill scopes until there are ``count``."""
        for scope in scopes(count)[self._filled :]:
            fill(self.registry, scope, self._source, self._per_scope, own_bytes=True)
        self._filled = count

    def measure(self, served: Sequence[Scope]) -> Told:
        """One kind of replica: cold, idle, and told of changes in its scopes and in others."""
        with reader(self.registry.layout.root) as one:
            cold = one.ask("open", scopes=[list(scope) for scope in served])
            assert cold["result"] == len(served) * self._per_scope, cold
            one.ask("look")
            idle = [one.ask("look") for _ in range(self._rounds)]
            assert not any(look["result"] for look in idle)
            told = {"cold": [cold], "idle": idle, "search": [one.ask("search") for _ in range(3)]}
            home, away = served[len(served) // 2], Scope("elsewhere", "tiny")
            told["write"], told["seen"] = self._changes(one, home, new=True)
            told["write elsewhere"], told["passed over"] = self._changes(one, away, new=False)
            return told

    def replicas(self) -> dict[str, list[Told]]:
        """What whole replicas make of a change, in turns: one of a registry of one scope, two of this one."""
        every = scopes(self._filled)
        kinds = [(self._small, every[:1]), (self.registry, every[:1]), (self.registry, every)]
        told: dict[str, list[Told]] = {kind: [] for kind in REPLICAS}
        with ExitStack() as stack:
            some = []
            for number, (registry, served) in enumerate(kinds):
                one = stack.enter_context(reader(registry.layout.root))
                spaces, stage = [scope.namespace for scope in served], self._stages / str(number)
                known = one.ask("replica", namespaces=spaces, stage=str(stage), replica_id=f"r{number}")
                assert known["result"] == len(served) * self._per_scope, known
                one.ask("list")
                some.append((one, registry, f"r{number}", served[len(served) // 2]))
            for _ in range(self._rounds):
                self._names += 1
                for kind, each in zip(REPLICAS, some, strict=True):
                    told[kind].append(self._reported(*each))
        for _, registry, replica, scope in some:
            for number in range(self._names - self._rounds + 1, self._names + 1):
                unregister(registry, f"{replica}-{number:05d}", scope)
        return told

    def _reported(self, one: Reader, registry: Registry, replica: str, scope: Scope) -> Told:
        """One change, until the replica's status file tells of it; then its list."""
        name, file = f"{replica}-{self._names:05d}", registry.layout.replica(replica)
        time.sleep(SETTLE_S)
        one.ask("took")
        register(registry, name, self._source, scope)
        deadline = time.monotonic() + LAST_REPORT_S
        while not file.exists() or f"{scope}/v1/{name}" not in file.read_text():
            assert time.monotonic() < deadline, f"{replica} does not report {name}"
            time.sleep(0.02)
        took, listed = one.ask("took"), one.ask("list")
        return {**took, "list_s": listed["cpu_s"], "list_bytes": listed["bytes"]}

    def _changes(self, one: Reader, scope: Scope, *, new: bool) -> tuple[list[Told], list[Told]]:
        written, read = [], []
        for _ in range(self._rounds):
            self._names += 1
            written.append(self.register(scope))
            read.append(one.ask("look"))
            assert read[-1]["result"] is new, "the next poll saw what it should not, or did not see it"
        for number in range(self._names - self._rounds + 1, self._names + 1):
            unregister(self.registry, f"new-{number:05d}", scope)
        one.ask("look")
        return written, read

    def register(self, scope: Scope) -> Told:
        """Register one more; what it took."""
        before, cpu, began = self.calls.total(), time.thread_time(), time.perf_counter()
        register(self.registry, f"new-{self._names:05d}", self._source, scope)
        took = {"s": time.perf_counter() - began, "cpu_s": time.thread_time() - cpu}
        return {**took, "calls": per(self.calls.total(), before)}

    def fleet(self, replicas: int, seconds: float, settle_s: float) -> Told:
        """Real watchers in a few processes, polling as on a network filesystem: quiet, then with changes."""
        root, all_scopes = self.registry.layout.root, scopes(self._filled)
        of = [list(all_scopes[number % self._filled]) for number in range(replicas)]
        with ExitStack() as stack:
            some = [stack.enter_context(reader(root)) for _ in range(PROCESSES)]
            for number, one in enumerate(some):
                one.tell("serve", replicas=of[number::PROCESSES], poll_s=1.0, lag_s=60.0)
            started = [one.answer() for one in some]
            time.sleep(settle_s)  # after its start a reader lists again for a minute
            told: Told = {"started": started}
            for what, every_s in (("quiet", 0.0), ("a change a second", 1.0)):
                for one in some:
                    one.tell("window", seconds=seconds)
                times = list(self._register_every(every_s, seconds, all_scopes))
                windows = [one.answer() for one in some]
                told[what] = {"windows": windows, "late_s": _late(times, windows, replicas // self._filled)}
            return told

    def _register_every(
        self, every_s: float, seconds: float, among: Sequence[Scope]
    ) -> Iterator[tuple[float, str]]:
        end = time.monotonic() + seconds - LAST_CHANGE_S
        while every_s and time.monotonic() < end:
            scope = random.choice(among)
            self._names += 1
            self.register(scope)
            yield time.monotonic(), str(scope)
            time.sleep(every_s)


def _late(times: Sequence[tuple[float, str]], windows: Sequence[Told], each: int) -> list[float]:
    """Seconds from each acknowledgement to the first look of each replica of that scope after it."""
    late = []
    for at, scope in times:
        seen = sorted(one - at for told in windows for one, where in told["seen"] if where == scope)
        after = [delay for delay in seen if delay > -0.05][:each]
        assert len(after) == each, f"{len(after)} of {each} replicas of {scope} saw a change"
        late += after
    return late


def median(told: Sequence[Told], what: str) -> float:
    """Of one figure of many steps."""
    return float(statistics.median(one[what] for one in told))


def calls_of(told: Sequence[Told]) -> str:
    """The calls of the median step."""
    calls = sorted(told, key=lambda one: one["s"])[len(told) // 2]["calls"]
    kinds = {name: n for name, n in calls.items() if not name.endswith("bytes") and name != "names"}
    return f"{sum(kinds.values()):.0f}: " + ", ".join(f"{name} {n:.0f}" for name, n in kinds.items())


def show(sizes: dict[str, dict[str, Told]]) -> None:
    """Print the tables, and how each figure grew."""
    for kind in ("one scope", "all scopes"):
        print(f"\n| a replica of {kind} | " + " | ".join(sizes) + " | last / first |")
        print("|---" * (len(sizes) + 2) + "|")
        for label, step, what, scale, unit in ROWS:
            values = [scale * median(size[kind][step], what) for size in sizes.values()]
            cells = " | ".join(f"{value:.3g} {unit}" for value in values)
            print(f"| {label} | {cells} | {values[-1] / values[0]:.2f} |")
        for label, step in (
            ("calls of a poll", "idle"),
            ("of a registration", "write"),
            ("of seeing it", "seen"),
        ):
            print(
                f"| {label} | " + " | ".join(calls_of(size[kind][step]) for size in sizes.values()) + " | |"
            )


def show_replicas(told: dict[str, dict[str, list[Told]]]) -> None:
    """Print what whole replicas make of a change, those of one size taken in turns."""
    for size, kinds in told.items():
        print(f"\n| {size}: a replica | " + " | ".join(kinds) + " | last / first |")
        print("|---" * (len(kinds) + 2) + "|")
        for label, what, scale, unit in OF_REPLICAS:
            values = [scale * median(took, what) for took in kinds.values()]
            cells = " | ".join(f"{value:.3g} {unit}" for value in values)
            print(f"| {label} | {cells} | {values[-1] / values[0]:.2f} |")


def show_fleet(told: Told, replicas: int) -> None:
    """Print what the volume got of all replicas together."""
    print(f"\n| {replicas} replicas, a second | CPU, of one core | calls | names | MB read | seen after |")
    print("|---|---|---|---|---|---|")
    for what in ("quiet", "a change a second"):
        windows, late = told[what]["windows"], told[what]["late_s"]
        seconds = statistics.mean(one["s"] for one in windows)
        total: Counter[str] = Counter()
        for one in windows:
            total.update(one["calls"])
        calls = (
            sum(n for name, n in total.items() if not name.endswith("bytes") and name != "names") / seconds
        )
        cpu = 100 * sum(one["cpu_s"] for one in windows) / seconds
        delay = f"{statistics.median(late):.2f} s, worst {max(late):.2f} s" if late else ""
        read = total["read_bytes"] / 1e6 / seconds
        print(
            f"| {what} | {cpu:.1f} % | {calls:.0f} | {total['names'] / seconds:.0f} | {read:.2f} | {delay} |"
        )


def main() -> None:
    """Grow, measure at each size, then let the replicas poll."""
    options = arguments(
        __doc__ or "",
        scopes="1,10,100",
        per_scope=1000,
        rounds=30,
        replicas=200,
        seconds=30.0,
        settle=65.0,
        folder="",
        json="benchmarks/results/scale.json",
        plot="",
    )
    heading("Scale")
    results: Told = {"origin": origin("pydantic", "watchdog"), "options": vars(options)}
    results |= {"sizes": {}, "replicas": {}}
    with tempfile.TemporaryDirectory(dir=options.folder or None) as work:
        source = make_adapter(Path(work) / "adapter")
        bench = Bench(Path(work).resolve() / "volume", source, options.per_scope, options.rounds)
        for count in map(int, options.scopes.split(",")):
            bench.grow(count)
            kinds = {"one scope": scopes(count)[:1], "all scopes": scopes(count)}
            size = f"{count * options.per_scope:,}"
            results["sizes"][size] = {kind: bench.measure(served) for kind, served in kinds.items()}
            results["replicas"][size] = bench.replicas()
            print(f"measured {size}", file=sys.stderr)
        show(results["sizes"])
        show_replicas(results["replicas"])
        if options.replicas:
            results["fleet"] = bench.fleet(options.replicas, options.seconds, options.settle)
            show_fleet(results["fleet"], options.replicas)
    write_json(Path(options.json), results)
    if options.plot:
        write_plot(Path(options.plot), results)


if __name__ == "__main__":
    main()
