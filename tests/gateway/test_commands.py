"""The command line at a gateway: it has no volume, and a change is waited for on every replica."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL, Process
from lora_fs.demo.volume import LORA_FS
from lora_fs.sidecar import __version__
from tests.gateway.conftest import Stubs
from tests.gateway.test_broadcast import loads, owned
from tests.gateway.test_process import started, until
from tests.registry.conftest import write_adapter

__all__ = ["owned"]  # a fixture
ENDS_S = 120.0


@pytest.fixture
def two(owned: Stubs) -> Process:
    """A gateway before two replicas."""
    owned.add()
    owned.add()
    return started(owned, replicas=2)


def command(fleet: Stubs, gateway: Process, *words: str) -> subprocess.Popen[str]:
    """Start a command that knows the gateway's address and a token, and nothing else."""
    at = ("--server", gateway.url, "--token-file", fleet.env["LORA_FS_TOKEN_FILE"])
    pipe = subprocess.PIPE
    return subprocess.Popen([LORA_FS, *words, *at], text=True, stdout=pipe, stderr=pipe)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Wait for a command; return its exit code and what it printed."""
    out, err = process.communicate(timeout=ENDS_S)
    return process.returncode, out, err


def test_a_registration_waits_for_the_slow_replica(owned: Stubs, two: Process, tmp_path: Path) -> None:
    """`register --wait` at a gateway ends when every replica behind it follows; exit 6 names who does not."""
    source = str(write_adapter(tmp_path / "new"))
    httpx.post(f"{owned.engines[1]}/hold", **LOCAL).raise_for_status()
    registering = command(owned, two, "register", "new", source, "--policy", "eager", "--wait", "100")
    until(lambda: owned.counts(1)["asked"] == 1, ENDS_S)
    until(lambda: loads(owned)[0] == 1, ENDS_S)
    code, _, err = ended(command(owned, two, "register", "new", source, "--wait", "1ms"))
    assert (code, "r1 (Loading)" in err) == (6, True), err
    assert registering.poll() is None
    httpx.post(f"{owned.engines[1]}/release", **LOCAL).raise_for_status()
    assert ended(registering) == (0, "registered new@v1 in default/tiny\n", "")
    assert loads(owned) == [1, 1]
    code, out, err = ended(command(owned, two, "status", "new", "-o", "name"))
    assert (code, out) == (0, "new\n"), err


def test_the_fleet_shows_each_engines_own_queue(owned: Stubs, two: Process) -> None:
    """Also of requests that reached an engine without its sidecar; `status` shows running+waiting."""
    httpx.post(f"{owned.engines[1]}/hold", **LOCAL).raise_for_status()
    load = {"lora_name": "elsewhere", "lora_path": "/elsewhere"}
    with httpx.Client(timeout=ENDS_S) as client, ThreadPoolExecutor(1) as threads:
        loading = threads.submit(client.post, f"{owned.engines[1]}/v1/load_lora_adapter", json=load)
        try:

            def queues() -> dict[str, Any]:
                told = client.get(f"{two.url}/v1/fleet").json()["replicas"]
                return {one["replica"]: one["queue"] for one in told}

            idle = {"running": 0, "waiting": 0}
            until(lambda: queues() == {"r0": idle, "r1": {"running": 0, "waiting": 1}}, ENDS_S)
            code, out, err = ended(command(owned, two, "status"))
            assert (code, [" 0+0 " in out, " 0+1 " in out]) == (0, [True, True]), err + out
        finally:
            httpx.post(f"{owned.engines[1]}/release", **LOCAL).raise_for_status()
        assert loading.result(timeout=ENDS_S).status_code == 200


def test_the_status_at_a_gateway_shows_its_view_of_the_fleet(owned: Stubs, two: Process) -> None:
    """Which replica gets requests, which does not and why; no adapter is named without a token."""
    httpx.post(f"{owned.engines[1]}/fail", **LOCAL).raise_for_status()
    with httpx.Client(base_url=two.url, timeout=60) as client:

        def replicas() -> dict[str, dict[str, Any]]:
            return {one["replica"]: one for one in client.get("/v1/fleet").json()["replicas"]}

        until(lambda: "Via" in client.get("/metadata").headers)
        number = 0
        while replicas()["r1"]["state"] == "ready":
            client.post("/v1/completions", json={"model": f"a{number % 8}", "prompt": "x"})
            number += 1
            assert number < 1000
        told = replicas()
        assert [told[name]["state"] for name in ("r0", "r1")] == ["ready", "ejected"]
        assert 0 < told["r1"]["ejected_s"] <= 30
        assert told["r0"]["capacity"] == 4
        assert all(one["version"] == __version__ and one["seen_s"] < ENDS_S for one in told.values())
        assert "a1" not in client.get("/v1/fleet").text
        assert sorted(client.get("/v1/fleet?adapter=a1").json()["order"]) == ["r0", "r1"]
    people = command(owned, two, "status")
    scripts = command(owned, two, "status", "--exit-code", "-o", "json")
    code, out, err = ended(people)
    assert code == 0, err
    rows = [line.split() for line in out.partition("GATEWAY")[2].splitlines()[1:]]
    assert [row[:2] for row in rows] == [["r0", "ready"], ["r1", "ejected,"]]
    assert "its last answers all failed" in out
    code, out, err = ended(scripts)
    assert (code, "the gateway leaves out: 1" in err) == (1, True), err
    assert [one["state"] for one in json.loads(out)["fleet"]["replicas"]] == ["ready", "ejected"]
