"""The gateway's page in a real Chromium, before real sidecars with stand-ins for engines."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from lora_fs.demo.process import LOCAL, Process
from lora_fs.sidecar import __version__
from tests.dashboard.browsing import Open, browser, open_page, violations
from tests.gateway.conftest import Stubs, fleet, forks
from tests.gateway.test_process import started, until

__all__ = ["browser", "fleet", "forks", "open_page"]  # fixtures
WITHIN_S = 60.0


def line(page: Page, replica: str) -> Any:
    """A replica's line, as a screen reader finds it."""
    return page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=replica, exact=True))


def tile(page: Page, title: str) -> Any:
    """The number under a title at the top."""
    return page.locator("#tiles > div").filter(has_text=title).locator("dd")


def states(gateway: Process) -> list[str]:
    """What the gateway says of each replica."""
    return [one["state"] for one in httpx.get(f"{gateway.url}/v1/fleet", **LOCAL).json()["replicas"]]


@contextmanager
def ejected(fleet: Stubs, gateway: Process) -> Iterator[None]:
    """Inside the block the second replica is ejected: its engine fails, and clients go on asking."""
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=gateway.url, timeout=60) as client:
            for number in itertools.count():
                client.post("/v1/completions", json={"model": f"a{number % 8}", "prompt": "x"})
                if over.wait(0.02):
                    return

    httpx.post(f"{fleet.engines[1]}/fail", **LOCAL).raise_for_status()
    clients = threading.Thread(target=ask)
    clients.start()
    try:
        until(lambda: states(gateway)[1] == "ejected", WITHIN_S)
        yield
    finally:
        over.set()
        clients.join()


def test_replicas_their_state_and_an_adapters_homes(fleet: Stubs, open_page: Open) -> None:
    """Which replica gets requests, which is ejected, which is out and why; an adapter's homes by its name."""
    listed = [word for _ in range(2) for word in ("--replica", fleet.add().url)]
    gateway = started(fleet, *listed, replicas=2)
    page = open_page(gateway.url)
    expect(line(page, "r0")).to_contain_text("ready")
    expect(line(page, "r1")).to_contain_text(__version__)
    expect(line(page, "r1").get_by_role("cell", name="0 + 0", exact=True)).to_be_visible()  # its queue
    expect(tile(page, "Replicas ready")).to_have_text("2 / 2")
    expect(page.locator("#incident")).to_be_hidden()
    expect(page.get_by_role("columnheader", name="Home")).to_be_hidden()
    order = httpx.get(f"{gateway.url}/v1/fleet?adapter=a1", **LOCAL).json()["order"]
    page.get_by_role("searchbox").fill("a1")
    expect(page.locator("#homes")).to_contain_text(f"Requests for a1 go to {order[0]}, and as demand grows")
    expect(line(page, order[0]).locator(".home")).to_have_text("1")
    expect(line(page, order[1]).locator(".home")).to_have_text("2")
    assert page.url.endswith("#adapter=a1")
    with ejected(fleet, gateway):
        expect(line(page, "r1")).to_contain_text(
            re.compile(r"ejected, \d+ s left.*its last answers all failed")
        )
        expect(tile(page, "Ejected")).to_have_text("1")
        expect(page.locator("#incident")).to_have_text("1 of 2 replicas gets no requests")
    assert violations(page) == []
    fleet.sidecars[0].stop()
    until(lambda: states(gateway)[0] == "out", WITHIN_S)
    expect(line(page, "r0").locator("td").first).to_have_text("out")
    why = httpx.get(f"{gateway.url}/v1/fleet", **LOCAL).json()["replicas"][0]["why"]
    expect(line(page, "r0")).to_contain_text(why[:20])
    page.set_viewport_size({"width": 390, "height": 844})
    expect(line(page, "r0").locator("td").first).to_be_in_viewport(ratio=1)
    expect(line(page, "r0").locator("td").last).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_a_link_leads_to_each_replicas_own_page(fleet: Stubs, open_page: Open) -> None:
    """By the address that the gateway reaches it by; its own page shows adapters."""
    fleet.add()
    page = open_page(started(fleet, replicas=1).url)
    link = line(page, "r0").get_by_role("link")
    expect(link).to_have_attribute("href", fleet.sidecars[0].url)
    replica = open_page(fleet.sidecars[0].url)
    expect(replica.get_by_role("gridcell", name="a1", exact=True)).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_list_that_cannot_be_read_and_a_gateway_that_ends(
    fleet: Stubs, open_page: Open, scheme: str
) -> None:
    """Both are said, with the reason; neither is an empty fleet without a word."""
    gateway = fleet.gateway("--replica", "dns://no-such-name.invalid:8001")
    until(lambda: is_up(gateway), WITHIN_S)
    page = open_page(gateway.url, quiet=False, color_scheme=scheme)
    expect(page.locator("#problem")).to_contain_text("The gateway has a problem: ")
    expect(page.locator("#problem")).to_contain_text("no-such-name.invalid")
    expect(page.locator("#incident")).to_have_text("No replica was found")
    assert violations(page) == []
    gateway.stop()
    expect(page.locator("#problem")).to_contain_text("This gateway does not answer since")
    expect(page.locator("#live")).to_have_attribute("data-state", "lost")


def is_up(gateway: Process) -> bool:
    """Whether the process answers."""
    try:
        return httpx.get(f"{gateway.url}/metrics", **LOCAL).is_success
    except httpx.TransportError:
        return False
