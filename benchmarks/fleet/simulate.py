"""The gateway's production choice on a virtual clock, beside other ways to choose a replica.

Each client sends its next request when the last one is over. Adapters are asked for by Zipf's law.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from policies import POLICIES, Make, Policy
from replicas import Clock, Pace, Replica, Request

SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A fleet and what happens to it. Seconds count from the end of the warm-up.

    Attributes:
        swaps_per_s: how often an adapter that is asked for trades its popularity with any other one.
        dying: replicas that die after a third of the time, and are back, empty, after two thirds.
        more: replicas that join after a third, and leave in good order after two thirds.
        poll_s: between two reports of a replica.
        lag_s: how old a report is when it arrives.
    """

    replicas: int = 200
    adapters: int = 10_000
    clients: int = 1_600
    warm_s: float = 60.0
    seconds: float = 60.0
    exponent: float = 1.0
    swaps_per_s: float = 0.0
    dying: int = 0
    more: int = 0
    poll_s: float = 2.0
    lag_s: float = 0.05
    pace: Pace = field(default_factory=Pace)


SCENARIOS = {
    "steady": Scenario(),
    "drifting": Scenario(swaps_per_s=20.0),
    "dying": Scenario(dying=20),
    "scaling": Scenario(more=60),
    "stale": Scenario(poll_s=10.0, lag_s=5.0),
}


class Demand:
    """Which adapter is asked for next."""

    def __init__(self, count: int, exponent: float, seed: int) -> None:
        self._random = random.Random(seed)
        self._ranked = [f"a{number:05d}" for number in range(count)]
        self._random.shuffle(self._ranked)
        self._weights = [(rank + 1) ** -exponent for rank in range(count)]
        self._cumulated = [*itertools.accumulate(self._weights)]
        self._rank = {one: rank for rank, one in enumerate(self._ranked)}

    def next(self) -> str:
        """Return an adapter."""
        return self._ranked[self._pick()]

    def _pick(self) -> int:
        return self._random.choices(range(len(self._ranked)), cum_weights=self._cumulated)[0]

    def swap(self) -> None:
        """Let an adapter that is asked for trade its rank with any other."""
        one, other = self._pick(), self._random.randrange(len(self._ranked))
        self._ranked[one], self._ranked[other] = self._ranked[other], self._ranked[one]
        self._rank[self._ranked[one]], self._rank[self._ranked[other]] = one, other

    def coldest(self, adapters: list[str]) -> str:
        """Return the one that is asked for least."""
        return max(adapters, key=self._rank.__getitem__)

    def bound(self, places: int) -> float:
        """Return the share of requests for the ``places`` adapters that are asked for most."""
        return float(sum(self._weights[:places]) / self._cumulated[-1])


class Simulation:
    """One run of one policy."""

    def __init__(self, scenario: Scenario, make: Make, seed: int, *, by_demand: bool = False) -> None:
        self.scenario, self.clock = scenario, Clock()
        self.demand = Demand(scenario.adapters, scenario.exponent, seed)
        self._coldest = self.demand.coldest if by_demand else _oldest
        self._random = random.Random(seed + 1)
        self.fleet: dict[str, Replica] = {}
        self.ever: list[Replica] = []
        self.policy: Policy = make(self.clock, self.fleet, seed)
        self._took = list[float]()
        self._hits = self._answers = self._errors = 0
        self._copies = list[float]()

    def run(self) -> dict[str, float]:
        """Run it, and return the figures of the time after the warm-up."""
        of, clock = self.scenario, self.clock
        for number in range(of.replicas):
            self._join(f"r{number:03d}", number / of.replicas * of.poll_s)
        for number in range(of.clients):
            clock.after(of.poll_s + number / of.clients, self._ask)
        if of.swaps_per_s:
            clock.after(1 / of.swaps_per_s, self._drift)
        clock.run_until(of.warm_s)
        before = {one.name: (one.served, one.loads) for one in self.ever}
        loads = sum(one.loads for one in self.ever)
        changed = self._change()
        stayed = [one for one in self.ever if one.name not in changed]
        for one in self.ever:
            one.worst = 0
        self._took.clear()
        self._hits = self._answers = self._errors = 0
        clock.after(0.0, self._sample)
        clock.run_until(of.warm_s + of.seconds)
        served = [one.served - before[one.name][0] for one in stayed]
        self._took.sort()
        return {
            "requests/s": self._answers / of.seconds,
            "hits": self._hits / self._answers,
            "copies": sum(self._copies) / len(self._copies),
            "loads a request": (sum(one.loads for one in self.ever) - loads) / self._answers,
            "busiest/mean": max(served) * len(served) / sum(served),
            "worst queue": max(one.worst for one in self.ever),
            "p50 s": self._took[len(self._took) // 2],
            "p95 s": self._took[int(len(self._took) * 0.95)],
            "errors": self._errors,
        }

    def _change(self) -> set[str]:
        """Arrange for what happens to the fleet; return who does not stay."""
        of, names = self.scenario, [*self.fleet]
        dying = self._random.sample(names, of.dying)
        more = [f"m{number:03d}" for number in range(of.more)]
        third = of.seconds / 3
        for name in dying:
            self.clock.after(third, partial(self._die, name))
            self.clock.after(2 * third, partial(self._join, name))
        for name in more:
            self.clock.after(third, partial(self._join, name))
            self.clock.after(2 * third, partial(self._leave, name))
        return set(dying)

    def _join(self, name: str, first_poll_s: float = 0.0) -> None:
        replica = Replica(name, self.clock, self.scenario.pace, self._coldest)
        self.fleet[name] = replica
        self.ever.append(replica)
        self.clock.after(first_poll_s, lambda: self._poll(replica))

    def _die(self, name: str) -> None:
        self.fleet.pop(name).die()

    def _leave(self, name: str) -> None:
        del self.fleet[name]  # it answers what it has
        self.policy.lost(name)

    def _poll(self, replica: Replica) -> None:
        if self.fleet.get(replica.name) is not replica:
            return
        resident, at = [*replica.resident], self.clock.now
        self.clock.after(self.scenario.lag_s, lambda: self.policy.report(replica, resident, at))
        self.clock.after(self.scenario.poll_s, lambda: self._poll(replica))

    def _ask(self) -> None:
        self.policy.ask(Request(self.demand.next(), self.clock.now, self._done))

    def _done(self, request: Request, served: bool) -> None:
        self.policy.over(request, served=served)
        if served:
            self._answers += 1
            self._hits += request.hit
            self._took.append(self.clock.now - request.asked_at)
        else:
            self._errors += 1
        self.clock.after(0.0, self._ask)

    def _drift(self) -> None:
        self.demand.swap()
        self.clock.after(1 / self.scenario.swaps_per_s, self._drift)

    def _sample(self) -> None:
        held = [adapter for replica in self.fleet.values() for adapter in replica.resident]
        self._copies.append(len(held) / max(1, len(set(held))))
        self.clock.after(SAMPLE_S, self._sample)


def _oldest(idle: list[str]) -> str:
    return idle[0]


def simulated(scenario: Scenario, policy: str, seed: int = 1) -> dict[str, float]:
    """Run one policy in one scenario, and return its figures."""
    return Simulation(scenario, POLICIES[policy], seed, by_demand=policy == "oracle").run()


def main() -> None:
    """Run each policy in each scenario; print one line of JSON for each."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--scenario", action="append", choices=SCENARIOS, help="all of them by default")
    options.add_argument("--policy", action="append", choices=POLICIES, help="all of them by default")
    options.add_argument(
        "--seconds", type=float, default=60.0, help="of virtual time, 10 at least, after as much of warm-up"
    )
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    if given.seconds < 10:
        options.error("--seconds: before 10 s some policies have answered nothing")
    for name in given.scenario or SCENARIOS:
        scenario = replace(SCENARIOS[name], seconds=given.seconds, warm_s=given.seconds)
        demand = Demand(scenario.adapters, scenario.exponent, given.seed)
        bound = demand.bound(scenario.replicas * scenario.pace.places)
        print(json.dumps({"scenario": name, "most hits": round(bound, 3)}), flush=True)
        for policy in given.policy or POLICIES:
            began = time.process_time()
            figures = simulated(scenario, policy, given.seed)
            figures["took s"] = time.process_time() - began
            rounded = {key: round(value, 3) for key, value in figures.items()}
            print(json.dumps({"scenario": name, "policy": policy, **rounded}), flush=True)


if __name__ == "__main__":
    main()
