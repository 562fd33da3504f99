"""Where replicas are: what names in DNS answer, and what keeps an answer away from the others."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import InputError, TemporaryError
from lora_fs.sidecar.gateway import discovery
from lora_fs.sidecar.gateway.discovery import Given, Registered
from lora_fs.sidecar.model import ReplicaStatus
from lora_fs.sidecar.reconcile.watch import reports
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.volume import atomic

Answer = Callable[[], list[str]]


class Names(dict[str, Answer]):
    """Names, and what answers for each: its addresses, of both families, or a resolver's error."""

    def getaddrinfo(self, host: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        assert options == {"type": socket.SOCK_STREAM, "flags": socket.AI_ADDRCONFIG}
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (one, port, 0, 0))
            if ":" in one
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port))
            for one in self[host]()
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """Stand in for DNS."""
    names = Names()
    monkeypatch.setattr(socket, "getaddrinfo", names.getaddrinfo)
    return names


def none() -> list[str]:
    """Answer as for a headless Service without a ready pod."""
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_each_address_of_a_name_is_a_replica_once(names: Names) -> None:
    """Of both families, in the answer twice, and at a URL that stands in the list as well."""
    names["r"] = lambda: ["10.0.0.1", "fd00::1", "10.0.0.1", "fd00::1", "10.0.0.2"]
    given = Given(["http://10.0.0.2:8001/", "dns://r:8001/", "DNS://r:8002"])
    hosts = ("10.0.0.2", "10.0.0.1", "[fd00::1]")
    wanted = [f"http://{host}:8001" for host in hosts]
    wanted += [f"http://{host}:8002" for host in (*hosts[1:], hosts[0])]
    assert dict(asyncio.run(given.find())) == dict.fromkeys(wanted)


def test_an_address_that_no_replica_has_is_refused_and_the_others_are_found(names: Names) -> None:
    names["r"] = lambda: ["169.254.169.254", "fe80::1%eth0", "10.0.0.1"]
    found = dict(asyncio.run(Given(["dns://r:8001"]).find()))
    assert found.pop("http://10.0.0.1:8001") is None
    whys = {url: "" if why is None else why for url, why in found.items()}
    assert whys.keys() == {"http://169.254.169.254:8001", "http://[fe80::1%eth0]:8001"}
    assert all("link-local" in why for why in whys.values())


def test_a_name_without_an_address_keeps_its_own_and_hides_no_others(names: Names) -> None:
    """As one of two headless Services that is scaled to zero: pods of the other one come and go meanwhile."""
    names.update(one=lambda: ["10.0.0.1"], other=lambda: ["10.0.1.1"])

    async def scenario() -> None:
        given = Given(["dns://one:8001", "dns://other:8001"])
        assert set(await given.find()) == {"http://10.0.0.1:8001", "http://10.0.1.1:8001"}
        names.update(one=none, other=lambda: ["10.0.1.2"])
        found = dict(await given.find())
        why = found.pop("dns://one:8001")
        assert found == {"http://10.0.0.1:8001": None, "http://10.0.1.2:8001": None}
        assert why is not None
        assert why.startswith("the name one of the replicas is not resolved: ")
        assert "Name or service not known" in why
        names["one"] = lambda: ["10.0.0.2"]
        assert dict(await given.find()) == {"http://10.0.0.2:8001": None, "http://10.0.1.2:8001": None}

    asyncio.run(scenario())


def test_a_url_needs_no_name(names: Names) -> None:
    """A DNS that is down when the gateway starts keeps it from no replica with an address of its own."""
    names["r"] = none
    found = asyncio.run(Given(["http://10.0.0.1:8001", "dns://r:8001"]).find())
    assert set(found) == {"http://10.0.0.1:8001", "dns://r:8001"}
    assert found["http://10.0.0.1:8001"] is None


def test_names_that_all_fail_leave_the_list_unknown(names: Names) -> None:
    """The error names each one."""
    names.update(one=none, other=none)
    with pytest.raises(TemporaryError, match=r"name one of .* name other of .* is not resolved"):
        asyncio.run(Given(["dns://one:8001", "dns://other:8001"]).find())
    assert asyncio.run(Given(()).find()) == {}


def test_a_name_whose_resolver_hangs_delays_no_other_one(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread waits for it, however many looks there are, and what it says in the end counts."""
    answers = threading.Event()

    async def scenario() -> None:
        loop, asked = asyncio.get_running_loop(), asyncio.Queue[str]()

        def late() -> list[str]:
            loop.call_soon_threadsafe(asked.put_nowait, "one")
            answers.wait()
            return ["10.0.0.1"]

        def at_once() -> list[str]:
            loop.call_soon_threadsafe(asked.put_nowait, "other")
            return ["10.0.1.1"]

        names.update(one=late, other=at_once)
        given = Given(["http://10.0.2.1:8001", "dns://one:8001", "dns://other:8001"])
        looking = asyncio.create_task(given.find())
        async with asyncio.timeout(60):
            assert {await asked.get(), await asked.get()} == {"one", "other"}
        looking.cancel()
        names["other"] = none
        with monkeypatch.context() as patch:
            patch.setattr(discovery, "READ_S", 0.01)
            for _ in range(2):
                found = await given.find()
                assert found["http://10.0.2.1:8001"] is None
                why = "the name one of the replicas is not resolved: no answer in 0.01 s"
                assert found["dns://one:8001"] == why
        assert asked.empty()
        answers.set()
        found = await given.find()
        assert found.keys() == {
            "http://10.0.2.1:8001",
            "http://10.0.0.1:8001",
            "http://10.0.1.1:8001",
            "dns://other:8001",
        }

    try:
        asyncio.run(scenario())
    finally:
        answers.set()


def test_a_duplicate_is_none_of_the_replicas_that_are_too_many(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MAX_REPLICAS", 2)
    names["r"] = lambda: ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    given = Given(["dns://r:8001"])
    assert set(asyncio.run(given.find())) == {"http://10.0.0.1:8001", "http://10.0.0.2:8001"}
    names["r"] = lambda: ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert discovery.BEYOND in asyncio.run(given.find())


def test_a_report_that_changes_moves_its_replica(tmp_path: Path) -> None:
    """To another address, to none, and to another model: where it was, nobody is asked any more."""
    with closing(Registry(tmp_path, create=True)) as registry:
        found = Registered(registry.layout, "tiny")
        for model, url in (
            ("tiny", "http://r0:1"),
            ("tiny", "http://r0:2"),
            ("tiny", None),
            ("other", "http://r0:2"),
        ):
            status = ReplicaStatus(replica="r0", model=model, namespaces=(), url=url)
            registry.layout.replica("r0").write_bytes(seal(status))
            wanted = {url: None} if model == "tiny" and url is not None else {}
            assert dict(asyncio.run(found.find())) == wanted


def test_reports_of_other_models_hide_no_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look reads so many status files and no more: the next one goes on behind them, and begins anew."""
    monkeypatch.setattr(reports, "MAX_READ", 4)
    with closing(Registry(tmp_path, create=True)) as registry:
        for number in range(9):
            model, replica = ("tiny", f"b{number}") if number == 8 else ("other", f"a{number}")
            status = ReplicaStatus(replica=replica, model=model, namespaces=(), url=f"http://{replica}:1")
            registry.layout.replica(replica).write_bytes(seal(status))
        found, read, real = Registered(registry.layout, "tiny"), list[str](), atomic.read_bytes

        def seen(path: Path) -> bytes | None:
            read.append(path.stem)
            return real(path)

        monkeypatch.setattr(atomic, "read_bytes", seen)
        for wanted in ({}, {}, {"http://b8:1": None}, {"http://b8:1": None}):
            read.clear()
            assert dict(asyncio.run(found.find())) == wanted
            assert len(read) == 4
        registry.layout.replica("b8").unlink()
        assert dict(asyncio.run(found.find())) == {}


@pytest.mark.parametrize(
    "one",
    [
        "dns://r",
        "dns://r:0",
        "dns://r:99999",
        "dns://r:x",
        "dns://:1",
        "dns://[::1",
        "dns://r:1/x",
        "dns://u@r:1",
    ],
)
def test_a_name_that_is_written_wrong_is_refused(one: str) -> None:
    """At the start, in words."""
    with pytest.raises(InputError, match="as dns://NAME:PORT"):
        Given([one])


@pytest.mark.parametrize("one", ["http://[::1", "http://r:99999", "ftp://r:1", "r:1"])
def test_a_url_that_is_written_wrong_is_refused(one: str) -> None:
    """At the start, in words."""
    with pytest.raises(InputError, match="the replica's address"):
        Given([one])
