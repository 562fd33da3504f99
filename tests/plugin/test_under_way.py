"""A load and who wants it, where several API servers ask for one adapter."""

from __future__ import annotations

from typing import Any

from lora_fs.worker_patch.worker.load.loader import Done
from lora_fs.worker_patch.worker.load.under_way import UnderWay


def ask(user: str, sequence: int = 1, *, spare: bool = False) -> dict[str, Any]:
    return {"user": user, "sequence": sequence, "spare": spare}


def begun() -> UnderWay[object]:
    loads: UnderWay[object] = UnderWay()
    loads.begin(7, ask("api-0"))
    return loads


def test_a_second_server_leaves_a_load_as_it_was_asked_for() -> None:
    """One that wants it only if there is room to spare does not take the first one's room."""
    loads = begun()
    loads.want(7, ask("api-1", spare=True))
    load = loads.get(7)
    assert load is not None
    assert (load.user, load.asked["spare"]) == ("api-0", False)


def test_a_server_takes_over_what_another_gave_up() -> None:
    loads = begun()
    loads.give_up(7, "api-0")
    loads.want(7, ask("api-1", spare=True))
    load = loads.get(7)
    assert load is not None
    assert (load.user, load.asked["spare"]) == ("api-1", True)


def test_nobody_gives_up_what_another_wants() -> None:
    loads = begun()
    loads.give_up(7, "api-1")
    loads.give_up_unmeant("api-1", (), 9)
    assert loads.given_up() == []
    loads.give_up(7, "api-0")
    assert loads.given_up() == [7]


def test_a_look_gives_up_what_it_does_not_mean() -> None:
    """Not a load that began since: the look does not know of it."""
    loads = begun()
    loads.give_up_unmeant("api-0", (7,), 9)
    loads.give_up_unmeant("api-0", (), 1)
    assert loads.given_up() == []
    loads.give_up_unmeant("api-0", (), 2)
    assert loads.given_up() == [7]


def test_only_a_load_that_ended_well_is_taken() -> None:
    """And only the one that all ranks have: a number of an earlier try means nothing."""
    loads = begun()
    assert loads.take(7, ["api-0 1"]) is None
    loads.ended(Done(7, None, reason="no memory"))
    assert loads.take(7, ["api-0 1"]) is None
    load = loads.begin(7, ask("api-0", 2))
    loads.ended(Done(7, object()))
    assert loads.take(7, ["api-0 1"]) is None
    assert loads.take(7, ["api-1 9", "api-0 2"]) is load
    assert [*loads] == []
