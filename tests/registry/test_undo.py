"""Loads of one name that are taken back, in any order: what was there before is there afterwards."""

from __future__ import annotations

import concurrent.futures
import itertools
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import amend, ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
TRAINER = "http:trainer@10.0.0.1"  # at two gateways of one machine a trainer is one writer


@dataclass
class Site:
    """A registry in which ``a`` serves v1, the bytes of seed 1."""

    registry: Registry
    folder: Path

    name: str = "a"

    def put(self, seed: int, *, writer: str = "ci", activate: bool = True, origin: str = "register") -> Made:
        """Register a seed's bytes."""
        source = self.folder / str(seed)
        if not source.exists():
            write_adapter(source, seed)
        wanted = Registration(self.name, source, "file:///x", activate=activate, origin=origin)  # type: ignore[arg-type]
        return Made.by(ingest.register(self.registry, SCOPE, wanted, Expectation(), writer=writer))

    def load(self, seed: int) -> Made:
        """As ``POST /v1/load_lora_adapter`` does in place."""
        return self.put(seed, writer=TRAINER, origin="api")

    def take_back(self, made: Made, writer: str = TRAINER) -> None:
        take_back(self.registry, SCOPE, self.name, made, writer=writer)

    def state(self) -> tuple[str | None, set[str]]:
        """What the name serves, and what is registered."""
        pointer = release.active(self.registry, SCOPE, self.name)
        serves = pointer.revision if pointer is not None else None
        return serves, set(release.present_revisions(self.registry, SCOPE, self.name))


@pytest.fixture
def site(registry: Registry, tmp_path: Path) -> Site:
    site = Site(registry, tmp_path / "sources")
    site.put(1)
    return site


def test_two_loads_at_once(site: Site) -> None:
    """Whichever of two loads is taken back, and in whatever order, the name serves the last that stays.

    Their bytes are new, or served already, or the other one's, too.
    """
    pairs, orders = ((1, 2), (2, 1), (2, 2), (2, 3)), ((0,), (1,), (0, 1), (1, 0))
    for number, (pair, order) in enumerate(itertools.product(pairs, orders)):
        site.name = f"b{number}"
        site.put(1)
        made = [site.load(seed) for seed in pair]
        for which in order:
            site.take_back(made[which])
        stay = [one.revision for which, one in enumerate(made) if which not in order]
        assert site.state() == (["v1", *stay][-1], {"v1", *stay}), (pair, order)


@pytest.mark.parametrize("active", [True, False])
def test_what_was_registered_before_stays_as_it_was(site: Site, active: bool) -> None:
    """Its record is not written, and it is served only if it was."""
    site.put(2, activate=active)
    before, records = site.state(), release.present_revisions(site.registry, SCOPE, "a")
    for _ in range(2):
        made = site.load(2)
        assert site.state()[0] == "v2"
        site.take_back(made)
        site.take_back(made)
        assert site.state() == before
        assert release.present_revisions(site.registry, SCOPE, "a") == records


def test_a_record_that_another_one_wrote_last_stays(site: Site) -> None:
    """It was pinned since, or it is another caller's: who may register alone takes nobody's record away."""
    made = site.load(2)
    site.take_back(made, "http:somebody@10.0.0.2")
    assert site.state() == ("v1", {"v1", "v2"})
    pinned = site.load(3)
    amend.amend(site.registry, SCOPE, "a", [amend.with_labels({"kept": "yes"})], writer="ci", revision="v3")
    site.take_back(pinned)
    assert site.state() == ("v1", {"v1", "v2", "v3"})


def test_no_path_is_a_revision(site: Site) -> None:
    """A revision that is no name is refused before anything is read."""
    with pytest.raises(InputError):
        site.take_back(Made(revision="../v1", pointer="p", record="r"))


@dataclass
class Turns:
    """Lets one of two threads go on at a time, from one look at a series to its next.

    ``order``: whose turn it is, the last one first. When it is used up, both go on.
    """

    order: list[bool] = field(default_factory=list)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _ended: set[bool] = field(default_factory=set)
    _who: dict[int, bool] = field(default_factory=dict)

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Call both; raises what either raises."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for ended in [pool.submit(self._call, False, first), pool.submit(self._call, True, second)]:
                ended.result()
        self._ended.clear()
        self.order.clear()

    def _call(self, who: bool, call: Callable[[], None]) -> None:
        self._who[threading.get_ident()] = who
        try:
            self.wait()
            call()
        finally:
            with self._turn:
                self._ended.add(who)
                self._turn.notify_all()
                del self._who[threading.get_ident()]

    def wait(self) -> None:
        """Wait for the turn of this thread; any other one than the two goes on."""
        with self._turn:
            self._turn.notify_all()
            who = self._who.get(threading.get_ident())
            self._turn.wait_for(lambda: who is None or not self.order or self._ended or self.order[-1] == who)
            if self.order:
                self.order.pop()


@pytest.mark.parametrize("seeds", [(2, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("times", [12, pytest.param(600, marks=pytest.mark.long)])
def test_two_take_backs_at_once(
    site: Site, monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, int], times: int
) -> None:
    """However their steps fall between each other, and no lease is seen, nothing of either stays."""
    monkeypatch.setattr(writer, "lease", lambda *_, **__: nullcontext())
    turns = Turns()
    for step in ("latest", "newest", "generations", "confirm"):
        real = getattr(Registry, step)

        def gated(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            turns.wait()
            return real(*args, **kwargs)

        monkeypatch.setattr(Registry, step, gated)
    chance = random.Random(0)
    for number in range(times):
        site.name = f"b{number}"
        site.put(1)
        made = [site.load(seed) for seed in seeds]
        others = Site(Registry(site.registry.layout.root), site.folder, site.name)
        turns.order = [who for _ in range(20) for who in [chance.random() < 0.5] * chance.randrange(1, 8)]
        order = list(turns.order)
        turns.run(partial(site.take_back, made[0]), partial(others.take_back, made[1]))
        assert site.state() == ("v1", {"v1"}), (number, order)
