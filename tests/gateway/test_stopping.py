"""A gateway that a signal ends: requests under way go on, for as long as the setting says."""

from __future__ import annotations

import concurrent.futures
import os
import signal

import httpx
import pytest

from lora_fs.demo.process import Process
from lora_fs.sidecar.settings import GATEWAY_SHUTDOWN_S
from tests.gateway.conftest import Stubs
from tests.gateway.test_process import started, until


def takes_connections(gateway: Process) -> bool:
    try:
        return httpx.get(f"{gateway.url}/metrics", timeout=10).is_success
    except httpx.TransportError:
        return False


def stream(gateway: Process, count: int) -> list[str]:
    """The events of a stream, the last one of which says that it is whole."""
    body = {"model": "a1", "prompt": "x", "stream": True, "max_tokens": count}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60) as answer:
        return [*filter(None, answer.iter_lines())]


def test_a_stream_ends_well_after_the_signal(fleet: Stubs) -> None:
    """No new connection is taken meanwhile, and the process ends with the stream."""
    fleet.add(each_s=0.05)
    gateway = started(fleet, replicas=1)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, gateway, 40)
        until(lambda: fleet.counts(0)["under_way"] == 1)
        os.kill(gateway.pid, signal.SIGTERM)
        until(lambda: not takes_connections(gateway))
        assert not running.done()
        assert len(events := running.result()) == 41
        assert events[-1] == "data: [DONE]"
    assert gateway.wait_ended(timeout_s=60)


def test_a_stream_that_takes_longer_than_the_setting_says_is_cut(fleet: Stubs) -> None:
    """The time that a gateway gives is the one that is set."""
    fleet.add(each_s=0.05)
    gateway = started(fleet, replicas=1, LORA_FS_SHUTDOWN_TIMEOUT_S="0.2")
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream, gateway, 100_000)
        until(lambda: fleet.counts(0)["under_way"] == 1)
        os.kill(gateway.pid, signal.SIGTERM)
        assert gateway.wait_ended(timeout_s=60)
        with pytest.raises(httpx.TransportError):
            running.result()


def test_a_stream_has_the_time_that_the_charts_pod_gives() -> None:
    """Of 120 s, 10 go by before the signal. A gateway's connections end some seconds after their requests."""
    assert 60 < GATEWAY_SHUTDOWN_S <= 120 - 10 - 5
