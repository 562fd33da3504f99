"""Loads of one name that overlap, any of which are undone: what is not undone stays, and nothing else.

A load that is not undone yet may have been acknowledged at any time. So the rule holds after every step.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.registry.store.writer import Registry
from tests.registry.conftest import SCOPE, TRAINER, Site

Step = tuple[str, int]  # "load" or "undo", and which load

FORK = multiprocessing.get_context("fork")
WAIT_S = 60.0
WRITERS = (TRAINER, "http:trainer@10.0.0.2")


def orders(loads: int) -> Iterator[tuple[Step, ...]]:
    """Every order of ``loads`` loads and of the undoing of any of them, each undone after its load."""

    def longer(done: tuple[Step, ...], begun: int, open_: frozenset[int]) -> Iterator[tuple[Step, ...]]:
        if begun == loads:
            yield done
        else:
            yield from longer((*done, ("load", begun)), begun + 1, open_ | {begun})
        for one in sorted(open_):
            yield from longer((*done, ("undo", one)), begun, open_ - {one})

    return longer((), 0, frozenset())


class Model:
    """What the rule says of a name that served v1, the bytes of seed 1, before the first load."""

    def __init__(self) -> None:
        self.stay: dict[int, str] = {}

    def state(self) -> tuple[str, set[str]]:
        return (["v1", *self.stay.values()][-1], {"v1", *self.stay.values()})


def check(site: Site, steps: Sequence[Step], seeds: Sequence[int], writers: Sequence[str]) -> None:
    """Do the steps on the registry, and compare after each one."""
    model, made = Model(), dict[int, Made]()
    for number, (act, which) in enumerate(steps):
        if act == "load":
            made[which] = site.put(seeds[which], writer=writers[which], origin="api")
            model.stay[which] = made[which].revision
        else:
            site.take_back(made[which], writers[which])
            del model.stay[which]
        assert site.state() == model.state(), (seeds, steps[: number + 1])
    for which in made.keys() - model.stay.keys():  # repeated, it changes nothing more
        site.take_back(made[which], writers[which])
    assert site.state() == model.state(), (seeds, steps)


@pytest.mark.parametrize("loads", [1, 2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_loads_of_the_same_bytes(site: Site, loads: int) -> None:
    """In every order, whichever of them are undone."""
    for number, steps in enumerate(orders(loads)):
        site.name = f"b{number}"
        site.put(1)
        check(site, steps, [2] * loads, [WRITERS[0]] * loads)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_loads_of_any_bytes_by_any_writer(site: Site, data: st.DataObject) -> None:
    """Some have the bytes that the name served before, and trainers share bytes."""
    site.name = f"c{len(list(site.registry.layout.active(SCOPE).iterdir()))}"
    site.put(1)
    steps = data.draw(st.sampled_from(ORDERS), label="steps")
    seeds = data.draw(st.lists(st.integers(1, 3), min_size=4, max_size=4), label="seeds")
    writers = data.draw(st.lists(st.sampled_from(WRITERS), min_size=4, max_size=4), label="writers")
    check(site, steps, seeds, writers)


ORDERS = list(orders(4))


def _do(site: Site, calls: Connection, others: Connection) -> None:
    """Load and undo as the other process says, until it closes its end."""
    others.close()
    registry = Registry(site.registry.layout.root)
    ours = Site(registry, site.folder, site.name)
    with suppress(EOFError):
        while True:
            if (made := calls.recv()) is None:
                made = ours.load(2)
            else:
                ours.take_back(made)
            calls.send(made)


def test_two_processes(site: Site) -> None:
    """What an undo has to know of the others lies on the volume: another process undoes as well."""
    here, there = FORK.Pipe()
    other = FORK.Process(target=_do, args=(site, there, here), daemon=True)
    other.start()
    there.close()

    def asked(made: Made | None) -> Any:
        here.send(made)
        assert here.poll(WAIT_S), "the other process does not answer"
        return here.recv()

    for order in itertools.permutations(range(3)):
        made = [asked(None), site.load(2), asked(None)]
        for which in order:
            if which == 1:
                site.take_back(made[which])
            else:
                asked(made[which])
        assert site.state() == ("v1", {"v1"}), order
    here.close()
    other.join(WAIT_S)
