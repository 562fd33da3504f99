"""The volume itself goes away under running replicas, and comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import Replica
from lora_fs.demo.waiting import wait_until

NOTICED_S = 60.0


@pytest.fixture(scope="module")
def expected(
    pair: Pair[Replica], register: Callable[..., None], adapters: Callable[[int], Path]
) -> dict[str, str]:
    """Three adapters, and what both answer."""
    names = ("one", "two", "three")
    for seed, name in enumerate(names, start=10):
        register(name, adapters(seed))
    return {name: pair.answer(name) for name in names}


@pytest.fixture
def empty_mount(pair: Pair[Replica], expected: dict[str, str]) -> Iterator[None]:
    """An empty folder where the volume was, as when a mount is lost."""
    assert expected
    root = pair.volume.root
    away = root.with_name(f"{root.name}-away")
    root.rename(away)
    root.mkdir()
    yield
    for left in root.iterdir():
        assert left.name == ".replicas"
    root.rename(root.with_name(f"{root.name}-empty"))
    away.rename(root)


def conditions(pair: Pair[Replica]) -> str:
    """What a reports of itself."""
    return pair.a.http.get("/metadata").text + pair.a.http.get("/readyz").text


def test_an_empty_mount(pair: Pair[Replica], expected: dict[str, str], empty_mount: None) -> None:
    """It is not an empty registry: all stay listed and served, and the loss is reported."""
    healthy = conditions(pair)
    wait_until("the loss is told", lambda: conditions(pair) != healthy, timeout_s=NOTICED_S)
    for replica in pair.both:
        assert set(expected) <= replica.names()
    assert {name: pair.answer(name) for name in expected} == expected


def test_the_volume_is_back(
    pair: Pair[Replica],
    expected: dict[str, str],
    register: Callable[..., None],
    adapters: Callable[[int], Path],
) -> None:
    """What is registered then is served, with no restart."""
    register("four", adapters(13))
    assert pair.answer("four") not in expected.values()
    assert {name: pair.answer(name) for name in expected} == expected
