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
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.registry.store import writer
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic
from tests.registry.conftest import SCOPE, Site, write_adapter


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


def test_what_it_restores_is_withdrawn_meanwhile(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right before its pointer has its name: it looks again, and the name serves the one before that."""
    site.put(2)
    made, real = site.load(3), atomic.publish

    def overtaken(path: Path, *more: Any) -> bool:
        if path.parent.name == ".active":
            monkeypatch.undo()
            release.unregister(site.registry, SCOPE, "a", writer="ci", revision="v2")
        return real(path, *more)

    monkeypatch.setattr(atomic, "publish", overtaken)
    site.take_back(made)
    assert site.state() == ("v1", {"v1"})


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
    """Lets one of several threads go on at a time, from one look at a series to its next.

    ``order``: whose turn it is, the last one first. When it is used up, all go on.
    """

    order: list[int] = field(default_factory=list)
    _turn: threading.Condition = field(default_factory=threading.Condition)
    _ended: set[int] = field(default_factory=set)
    _who: dict[int, int] = field(default_factory=dict)

    def run(self, *calls: Callable[[], None]) -> None:
        """Call all of them; raises what one of them raises."""
        with concurrent.futures.ThreadPoolExecutor(len(calls)) as pool:
            for ended in [pool.submit(self._call, who, call) for who, call in enumerate(calls)]:
                ended.result()
        self._ended.clear()
        self.order.clear()

    def _call(self, who: int, call: Callable[[], None]) -> None:
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
        """Wait for the turn of this thread; any other one goes on."""
        with self._turn:
            self._turn.notify_all()
            who = self._who.get(threading.get_ident())
            self._turn.wait_for(lambda: who is None or self._is_next(who))
            if self.order:
                self.order.pop()

    def _is_next(self, who: int) -> bool:
        while self.order and self.order[-1] in self._ended:
            self.order.pop()
        return not self.order or self.order[-1] == who


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Takes turns at each look at a series, and no lease is seen."""
    monkeypatch.setattr(writer, "lease", lambda *_, **__: nullcontext())
    turns = Turns()
    for step in ("latest", "newest", "generations", "confirm"):
        real = getattr(Registry, step)

        def gated(*args: Any, real: Any = real, **kwargs: Any) -> Any:
            turns.wait()
            return real(*args, **kwargs)

        monkeypatch.setattr(Registry, step, gated)
    return turns


def shuffled(chance: random.Random, threads: int) -> list[int]:
    """An order in which threads go on for a few steps each."""
    return [who for _ in range(20) for who in [chance.randrange(threads)] * chance.randrange(1, 8)]


@pytest.mark.parametrize("seeds", [(2, 2), (2, 3), (2, 1)])
@pytest.mark.parametrize("times", [12, pytest.param(600, marks=pytest.mark.long)])
def test_two_take_backs_at_once(site: Site, turns: Turns, seeds: tuple[int, int], times: int) -> None:
    """However their steps fall between each other, and no lease is seen, nothing of either stays."""
    chance = random.Random(0)
    for number in range(times):
        site.name = f"b{number}"
        site.put(1)
        made = [site.load(seed) for seed in seeds]
        others = Site(Registry(site.registry.layout.root), site.folder, site.name)
        turns.order = shuffled(chance, 2)
        order = list(turns.order)
        turns.run(partial(site.take_back, made[0]), partial(others.take_back, made[1]))
        assert site.state() == ("v1", {"v1"}), (number, order)


@pytest.mark.parametrize("undone", [(), (0,), (0, 1), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("times", [12, pytest.param(600, marks=pytest.mark.long)])
def test_loads_and_take_backs_at_once(site: Site, turns: Turns, undone: tuple[int, ...], times: int) -> None:
    """Three loads of the same bytes, of which some are taken back: the others stay registered and served.

    A load finds the revision registered that another one undoes before the first one's pointer is written.
    """
    chance = random.Random(1)
    write_adapter(site.folder / "2", 2)
    for number in range(times):
        site.name = f"b{number}"
        site.put(1)
        stay = dict[int, str]()

        def load(which: int, name: str = site.name, stay: dict[int, str] = stay) -> None:
            own = Site(Registry(site.registry.layout.root), site.folder, name)
            made = own.load(2)
            if which in undone:
                own.take_back(made)
            else:
                stay[which] = made.revision

        turns.order = shuffled(chance, 3)
        order = list(turns.order)
        turns.run(*(partial(load, which) for which in range(3)))
        serves, registered = site.state()
        assert registered == {"v1", *stay.values()}, (number, order)
        assert serves in (stay.values() if stay else ["v1"]), (number, order)
