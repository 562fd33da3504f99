"""Staging ahead: what comes while a replica runs, one at a time, and nothing of what was there."""

from __future__ import annotations

import asyncio

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.catalog import Catalog, Served
from lora_fs.sidecar.reconcile.stage.disk_errors import StageFull
from lora_fs.sidecar.reconcile.stage.prefetch import Ahead
from tests.reconcile.test_plan import RECORD

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeStager:
    """Stages when it is let to."""

    def __init__(self) -> None:
        self.staged: list[str] = []
        self.there: set[str] = set()
        self.full: set[str] = set()
        self.room_bytes = 1 << 40
        self.at_once = self.most_at_once = 0
        self.idle = asyncio.Event()

    def has(self, record: Record) -> bool:
        return record.name in self.there

    async def stage(self, record: Record, *, make_room: bool) -> str:
        assert not make_room
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        self.staged.append(record.name)
        if record.spec.size_bytes > self.room_bytes:
            raise StageFull("no room")
        if record.name in self.full:
            raise VolumeUnavailable("no answer")
        return "/stage"


def catalog(*names: str) -> Catalog:
    """Adapters of as many digests; in a name after its letter: how many bytes."""
    served = {}
    for name in names:
        size = {"size_bytes": int(name[1:] or 1)}
        spec = RECORD.spec.model_copy(update={"digest": f"sha256:{name}", **size})
        served[name] = Served(name, RECORD.model_copy(update={"name": name, "spec": spec}))
    return Catalog(1, served)


async def staged(stager: FakeStager, *catalogs: Catalog, everything: bool = False) -> list[str]:
    """What is staged when these are seen one after the other."""
    ahead = Ahead(stager, everything=everything)  # type: ignore[arg-type]
    for one in catalogs:
        ahead.look(one)
    if ahead._task is not None:
        await ahead._task
    return stager.staged


async def test_what_was_there_is_left_to_its_requests() -> None:
    assert await staged(FakeStager(), catalog("a", "b")) == []


async def test_all_is_staged_if_it_is_to_be() -> None:
    assert await staged(FakeStager(), catalog("a", "b"), catalog("a", "b", "c"), everything=True) == [
        "a",
        "b",
        "c",
    ]


async def test_what_does_not_fit_is_tried_once_and_the_smaller_ones_follow() -> None:
    stager = FakeStager()
    stager.room_bytes = 5
    assert await staged(stager, catalog("a"), catalog("a", "b6", "c9", "d6", "e2", "f7", "g5")) == [
        "b6",
        "e2",
        "g5",
    ]


async def test_what_comes_is_staged_one_at_a_time() -> None:
    stager = FakeStager()
    assert await staged(stager, catalog("a"), catalog("a", "b", "c"), catalog("a", "b", "c", "d")) == [
        "b",
        "c",
        "d",
    ]
    assert stager.most_at_once == 1


async def test_what_fails_delays_no_other_and_is_not_tried_again() -> None:
    stager = FakeStager()
    stager.full = {"b"}
    seen = catalog("a", "b", "c")
    assert await staged(stager, catalog("a"), seen, seen, catalog("a", "b", "c")) == ["b", "c"]


async def test_what_is_there_or_gone_again_is_passed_over() -> None:
    stager = FakeStager()
    stager.there = {"b"}
    assert await staged(stager, catalog("a"), catalog("a", "b", "c", "d"), catalog("a", "b", "d")) == ["d"]
