"""The data behind the dashboard, over HTTP: changes alone, to whom they concern, and never a stalled loop."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.model import Download, Phase, ReplicaStatus, RevisionUsage, Scope
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.server.dashboard import board, fleet
from lora_fs.sidecar.server.dashboard.usage import FleetUsage, totals_of
from lora_fs.sidecar.server.middleware.access import Admin
from tests.dashboard.conftest import HERE, Live, sidecar
from tests.registry.conftest import Clock

WAIT_S = 20
USED = ("requests", "errors_4xx", "errors_5xx", "load_s")
Told = dict[str, Any]


class Reader:
    """A page without a browser: asks, takes over the changes, asks on."""

    def __init__(self, url: str, token: str = "") -> None:
        self.url, self.headers = url, {"Authorization": f"Bearer {token}"} if token else {}
        self.since = ""
        self.rows: dict[str, list[Any]] = {}
        self.columns: list[str] = []
        self.replicas: dict[str, Any] = {}
        self.told: list[Told] = []

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=60)

    def read(self, wait_s: float = WAIT_S) -> Told | None:
        """One answer, None if nothing changed."""
        answer = self.get(f"/v1/dashboard?since={self.since}&wait_s={wait_s}")
        assert answer.status_code in (200, 204), answer.text
        if answer.status_code == 204:
            return None
        told: Told = answer.json()
        if told["full"]:
            self.rows, self.replicas = {}, {}
        self.since, self.columns = told["since"], told["columns"]
        for name in told["gone"]:
            del self.rows[name]
        self.rows |= {row[0]: row for row in told["rows"]}
        self.replicas |= told["replicas"]
        self.told.append(told)
        return told

    def until(self, holds: Callable[[Reader], bool]) -> None:
        """Read on until it holds."""
        deadline = time.monotonic() + WAIT_S
        while not holds(self):
            assert time.monotonic() < deadline, (self.rows, self.replicas)
            self.read()

    def cell(self, name: str, replica: str) -> str | None:
        """The letter of an adapter on a replica; None where there is none."""
        if name not in self.rows or replica not in self.columns:
            return None
        return str(self.rows[name][6][self.columns.index(replica)])


def test_changes_come_alone(live: Live) -> None:
    """One report that changed sends its row, not the others; a name that is withdrawn is told gone."""
    for name in ("a", "b", "c"):
        live.register(name)
    live.report("other", {"a": Phase.READY})
    reader = Reader(live.url)
    reader.until(lambda r: set(r.rows) == {"a", "b", "c"} and r.cell("a", "other") == "R")
    seen = len(reader.told)
    live.report("other", {"a": Phase.READY, "b": Phase.FAILED}, "the bytes are not the registered ones")
    reader.until(lambda r: r.cell("b", "other") == "F")
    assert [row[0] for told in reader.told[seen:] for row in told["rows"]] == ["b"]
    live.unregister("c")
    reader.until(lambda r: "c" not in r.rows)
    assert not any(told["full"] for told in reader.told[seen:])
    live.report("one more", {})
    reader.until(lambda r: "one more" in r.columns)
    assert reader.told[-1]["full"], "the cells of all rows stand elsewhere"


def test_a_reader_of_another_process_gets_all(live: Live) -> None:
    """A ``since`` that this process never gave, or nonsense, is nothing."""
    live.register("a")
    for since in ("", "00000000.7.999", "nonsense", "..", "a.b.c", "\u0661.\u0661.\u0661"):
        reader = Reader(live.url)
        reader.since = since
        reader.until(lambda r: "a" in r.rows)
        assert reader.told[0]["full"]
        assert reader.told[0]["history"]


def test_a_lost_replica_is_not_empty(live: Live) -> None:
    """What it said last is shown, and that it is not live; a damaged report is told, and costs no cell."""
    live.register("a")
    live.report("old", {"a": Phase.READY}, age_s=120)
    reader = Reader(live.url)
    reader.until(lambda r: r.cell("a", "old") == "R")
    assert reader.replicas["old"]["live"] is False
    Layout(live.root).replica("old").write_bytes(b"{torn")
    reader.until(lambda r: "old" in (r.told[-1]["problem"] or ""))
    assert reader.cell("a", "old") == "R"
    Layout(live.root).replica("old").unlink()
    reader.until(lambda r: r.columns == [HERE])


def test_replicas_of_another_model_are_not_shown(live: Live) -> None:
    """They are of another fleet on the same volume."""
    live.register("a")
    live.report("stranger", {"a": Phase.READY}, scope=Scope("default", "other-model"))
    live.report("sibling", {"a": Phase.READY})
    reader = Reader(live.url)
    reader.until(lambda r: r.cell("a", "sibling") == "R")
    assert reader.columns == [HERE, "sibling"]


def test_an_adapter_on_every_replica(live: Live) -> None:
    """Its record, and what each replica says of it; a name that is not there is a 404."""
    live.register("a")
    live.report("other", {"a": Phase.FAILED}, "torn")
    with httpx.Client(base_url=live.url, **LOCAL) as client:
        while (answer := client.get("/v1/dashboard/adapters/a")).status_code == 404:
            threading.Event().wait(0.02)
        told = answer.json()
        assert told["record"]["name"] == "a"
        assert told["replicas"]["other"]["message"] == "torn"
        assert client.get("/v1/dashboard/adapters/none").status_code == 404


def used(requests: int, errors: int = 0, loads: int = 0, load_s: float = 0.0) -> RevisionUsage:
    return RevisionUsage(requests=requests, errors_5xx=errors, loads=loads, load_seconds=load_s)


def test_the_counts_of_an_adapter_are_summed_over_the_fleet(live: Live) -> None:
    """A row has the requests, the errors and the mean load of all revisions on all replicas."""
    live.register("a")
    live.register("b")
    live.report("one", {}, usage={"default/tiny/v1/a": used(10, 1, 1, 1.0)})
    counts = {"default/tiny/v1/a": used(5, 1, 2, 0.5), "default/tiny/v2/a": used(7, 2)}
    live.report("two", {}, usage=counts)
    reader = Reader(live.url)
    reader.until(lambda r: r.rows.keys() == {"a", "b"} and r.rows["a"][8:] == [22, 4, 0.5])
    assert reader.rows["b"][8:] == [None, None, None]
    assert all(one["usage_whole"] for one in reader.replicas.values())
    live.report("two", {}, usage={"default/tiny/v1/a": used(6)}, usage_left_out=3)
    reader.until(lambda r: r.rows["a"][8:] == [16, 1, 1.0] and not r.replicas["two"]["usage_whole"])
    Layout(live.root).replica("one").unlink()
    reader.until(lambda r: r.rows["a"][8:] == [6, 0, None])


def test_counts_of_other_namespaces() -> None:
    """What a replica counts of namespaces and models that this one does not serve is in no sum. Sums are made
    every few seconds."""
    usage = FleetUsage()
    counts = {"default/tiny/v1/a": used(1), "other/tiny/v1/a": used(2), "default/large/v1/a": used(4)}
    usage.note(ReplicaStatus(replica="one", model="tiny", namespaces=("default", "other"), usage=counts))
    sums = usage.sums("tiny", ("default",))
    assert sums is not None
    assert {name: totals.requests for name, totals in sums.items()} == {"a": 1}
    assert usage.sums("tiny", ("default",)) is None


@pytest.mark.parametrize(("most", "read", "is_whole"), [(3, 3, True), (2, 3, False), (1, 2, False)])
def test_reports_beyond_those_that_are_read_leave_the_counts_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, read: int, is_whole: bool
) -> None:
    """One stands for all of them, however many there are."""
    monkeypatch.setattr(fleet, "MAX_READ", most)
    layout = Layout(tmp_path)
    layout.replicas.mkdir()
    for name in ("a", "b", "c"):
        status = ReplicaStatus(replica=name, model="tiny", namespaces=("default",))
        layout.replica(name).write_bytes(seal(status))
    said = fleet.Fleet(layout).of("own", ("default", "tiny", "sql"))
    assert (len(said), totals_of(said.values())) == (read, ({}, is_whole))


def test_each_revision_has_the_counts_of_the_fleet(live: Live) -> None:
    """What a report left out is unknown, and no 0; a canary's phase is not the name's."""
    live.register("a")
    live.revise("a", activate=False)
    live.report("one", {"a": Phase.READY, "a@v2": Phase.FAILED}, usage={"default/tiny/v2/a": used(10, 1)})
    live.report("two", {}, usage={"default/tiny/v2/a": used(5, 1, 2, 0.5)})
    with httpx.Client(base_url=live.url, **LOCAL) as client:

        def revisions() -> dict[str, Any]:
            answer = client.get("/v1/dashboard/adapters/a")
            return {one["revision"]: one for one in answer.json().get("revisions", ())}

        while len(revisions()) < 2:
            threading.Event().wait(0.02)
        second, first = revisions()["v2"], revisions()["v1"]
        assert [second[name] for name in USED] == [15, 0, 2, 0.25]
        assert [first[name] for name in USED] == [0, 0, 0, None]
        assert client.get("/v1/dashboard/adapters/a").json()["replicas"]["one"]["phase"] == "Ready"
        live.report("two", {}, usage={"default/tiny/v2/a": used(5)}, usage_left_out=1)
        assert [revisions()["v1"][name] for name in USED] == [None] * 4
        assert client.get("/v1/dashboard/adapters/a").json()["usage_whole"] is False


def test_a_canary_that_fails_beside_an_unloaded_name(live: Live) -> None:
    """A lazy name that waits for its first request is unloaded, whatever its canary's phase is there."""
    live.register("a")
    live.register("b")
    live.revise("a", activate=False)
    reader = Reader(live.url)
    reader.until(lambda r: r.rows.keys() == {"a", "b"})
    live.report("one", {"a@v2": Phase.FAILED, "b": Phase.FAILED})
    reader.until(lambda r: "F" in r.rows["b"][6])
    assert (reader.rows["a"][6][reader.columns.index("one")], reader.rows["a"][7]) == (".", "")
    with httpx.Client(base_url=live.url, **LOCAL) as client:
        assert "one" not in client.get("/v1/dashboard/adapters/a").json()["replicas"]


@pytest.fixture
def tenants(tmp_path: Path) -> Any:
    tokens = tmp_path / "tokens"
    tokens.write_text("for-team-a-only name=a namespaces=team-a\nfor-all-of-them name=ops\n")
    with sidecar(tmp_path, Admin(tokens, ("-",)), namespaces=("team-a", "team-b")) as one:
        for space in ("team-a", "team-b"):
            one.register(f"of-{space}", Scope(space, "tiny"))
        yield one


def test_tenants_do_not_see_each_other(tenants: Live) -> None:
    """Rows, names that went, conditions, downloads and details are of what the caller may read; who may not
    read every namespace gets no counts, and no name in what went wrong."""
    team, nobody, operators = (
        Reader(tenants.url, "for-team-a-only"),
        Reader(tenants.url),
        Reader(tenants.url, "for-all-of-them"),
    )
    operators.until(lambda r: len(r.rows) == 2)
    team.until(lambda r: set(r.rows) == {"team-a/of-team-a"})
    nobody.read()
    assert nobody.rows == {}
    tenants.report(
        "other",
        {},
        conditions=("NotAdopted: team-b/tiny/v1/secret: torn",),
        downloads={
            name: Download(
                name=name, namespace=name[:6], source="hf://x/y", phase=Phase.DOWNLOADING, since=""
            )
            for name in ("team-a/big", "team-b/big")
        },
        in_flight=3,
        scope=Scope("team-a", "tiny"),
    )
    Layout(tenants.root).replica("torn").write_bytes(b"{")
    for reader in (team, operators):
        reader.until(lambda r: bool("other" in r.replicas and r.told[-1]["problem"]))
    assert team.replicas["other"]["conditions"] == ["NotAdopted"]
    assert "secret" in operators.replicas["other"]["conditions"][0]
    downloads = [[one["name"] for one in r.replicas["other"]["downloads"]] for r in (team, operators)]
    assert downloads == [["team-a/big"], ["team-a/big", "team-b/big"]]
    assert team.replicas["other"]["figures"] == {}
    assert operators.replicas["other"]["figures"]["in_flight"] == 3
    assert [any(told["history"] for told in r.told) for r in (team, operators)] == [False, True]
    assert team.told[-1]["problem"] == "not everything could be read"
    assert "torn" in operators.told[-1]["problem"]
    tenants.unregister("of-team-b", Scope("team-b", "tiny"))
    operators.until(lambda r: len(r.rows) == 1)
    team.read(wait_s=1)
    assert "of-team-b" not in json.dumps(team.told)
    path = "/v1/dashboard/adapters/team-a/of-team-a"
    assert [r.get(path).status_code for r in (team, operators, nobody)] == [200, 200, 404]


def test_who_has_all_waits(live: Live) -> None:
    """Without news the answer is 204, after the time that was asked for and not before."""
    reader = Reader(live.url)
    reader.until(lambda r: HERE in r.replicas)
    while reader.read(wait_s=0.2) is not None:
        pass
    started = time.monotonic()
    while reader.read(wait_s=0.5) is not None:
        started = time.monotonic()
    assert time.monotonic() - started >= 0.4


def test_a_hung_volume_stops_nobody(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports that cannot be read are a word on the page; own rows and every other route go on."""
    monkeypatch.setattr(board, "LOOK_S", 0.2)
    hang, read = threading.Event(), atomic.list_names

    def stuck(path: Path) -> Any:
        if path.name == ".replicas":
            hang.wait(30)
        return read(path)

    monkeypatch.setattr(atomic, "list_names", stuck)
    live.register("a")
    reader = Reader(live.url)
    try:
        reader.until(lambda r: bool(r.told) and "does not answer" in (r.told[-1]["problem"] or ""))
        reader.until(lambda r: "a" in r.rows)
        assert httpx.get(f"{live.url}/health", **LOCAL).status_code == 200
    finally:
        hang.set()
    reader.until(lambda r: r.told[-1]["problem"] is None)


def test_nobody_looks_for_nobody(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """A while after the last reader no report is read any more; the next reader finds all."""
    clock, looks, read = Clock(), 0, atomic.list_names
    monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=clock, time=time.time))
    monkeypatch.setattr(board, "PERIOD_S", 0.0)  # it does not look as long as it could: it looks no more

    def counted(path: Path) -> Any:
        nonlocal looks
        looks += path.name == ".replicas"
        return read(path)

    def looked(asking: int) -> int:
        """How often, while the same loop answered so many others."""
        before = looks
        for _ in range(asking):
            assert httpx.get(f"{live.url}/health", **LOCAL).status_code == 200
        return looks - before

    monkeypatch.setattr(atomic, "list_names", counted)
    reader = Reader(live.url)
    reader.read()
    clock.now += board.IDLE_S - 1
    assert looked(20) > 0
    clock.now += 2
    deadline = time.monotonic() + WAIT_S
    while looked(20) > 0:
        assert time.monotonic() < deadline
    live.register("late")
    reader.until(lambda r: "late" in r.rows)
