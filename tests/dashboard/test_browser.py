"""The dashboard in a real Chromium: what is seen, by eye, by keyboard and by a screen reader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from lora_fs.demo.process import LOCAL
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.errors import EngineRejected
from lora_fs.sidecar.model import Download, Phase, RevisionUsage
from lora_fs.sidecar.model.evaluation import Measured
from lora_fs.sidecar.reconcile.telemetry.events import KEPT
from lora_fs.sidecar.registry.lifecycle import release
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from tests.dashboard.browsing import WITHIN_MS, Open, browser, open_page, violations
from tests.dashboard.conftest import HERE, SCOPE, Live, sidecar
from tests.server.conftest import FakeReplica, serving

__all__ = ["browser", "open_page"]  # fixtures
DIGEST = f"sha256:{64 * '0'}"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A fleet of three with four adapters; tests that read alone share it."""
    with sidecar(tmp_path_factory.mktemp("fleet")) as one:
        for name in ("billing", "search", "sql", "support"):
            one.register(name, labels={"team": "finance"} if name == "billing" else {})
        one.report("other-0", {"billing": Phase.READY, "sql": Phase.FAILED}, "the bytes are not <b>whole</b>")
        one.report("other-1", {"billing": Phase.READY, "support": Phase.LOADING})
        with one.heartbeats():  # a module of tests can take longer than a silent replica is shown as live
            yield one


def row(page: Page, name: str) -> Any:
    """An adapter's row, as a screen reader finds it."""
    return page.get_by_role("row").filter(has=page.get_by_role("gridcell", name=name, exact=True))


def tile(page: Page, title: str) -> Any:
    """The number under a title at the top."""
    return page.locator("#tiles > div").filter(has_text=title).locator("dd")


def test_adapters_and_replicas_are_shown(shared: Live, open_page: Open) -> None:
    """Each with its phase everywhere, in words and by cell; a reason is text, whatever is in it."""
    page = open_page(shared.url)
    expect(row(page, "sql")).to_contain_text("1 failed")
    expect(row(page, "sql")).to_contain_text("the bytes are not <b>whole</b>")
    expect(row(page, "billing").get_by_role("img", name="on 3 replicas: 2 ready")).to_be_visible()
    assert row(page, "sql").locator(".strip i").evaluate_all("all => all.map((one) => one.className)") == [
        "pE",
        "pF",
        "pE",
    ]
    assert page.locator("#replicas th").all_text_contents() == [HERE, "other-01", "other-1"]  # with failures
    expect(page.get_by_text("Replicas ready")).to_be_visible()
    expect(page.locator("#tiles")).to_contain_text("3 / 3")
    expect(page).to_have_title("(1) lora-fs · tiny")


def test_a_change_is_shown_without_a_reload(live: Live, open_page: Open) -> None:
    """What is registered comes, what fails is announced, what is withdrawn goes, a download moves."""
    live.register("first")
    page = open_page(live.url)
    expect(row(page, "first")).to_be_visible()
    live.register("second")
    expect(row(page, "second")).to_be_visible()
    live.report("other", {"second": Phase.FAILED}, "torn")
    expect(row(page, "second")).to_contain_text("torn")
    expect(page.locator("#said")).to_have_text("1 more adapters are failing: 1 in all")
    download = Download(
        name="big",
        namespace="default",
        source="s3://a/b",
        phase=Phase.DOWNLOADING,
        received_bytes=30_000_000,
        size_bytes=120_000_000,
    )
    live.report("other", {"second": Phase.READY}, downloads={"big": download})
    expect(page.get_by_role("progressbar", name="download of big")).to_have_js_property("value", 0.25)
    expect(page.locator("#downloads")).to_contain_text("30.0 MB of 120 MB")
    live.unregister("first")
    expect(row(page, "first")).to_have_count(0)


def test_failures_come_first(shared: Live, open_page: Open) -> None:
    """The table is sorted by state until another order is asked for."""
    page = open_page(shared.url)
    expect(page.locator("#scroll .row:visible .c-adapter").first).to_have_text("sql")
    expect(page.get_by_role("columnheader", name="State")).to_have_attribute("aria-sort", "ascending")


def test_what_is_not_so_now_is_not_counted(live: Live, open_page: Open) -> None:
    """Cells of a silent replica, and of one without its engine, are hatched, and counted nowhere as ready."""
    live.register("a")
    since = {"EngineUnavailable": "2020-02-03T18:47:00+00:00"}
    why = ("EngineUnavailable: connection refused",)
    live.report("down", {"a": Phase.READY}, engine="unknown", conditions=why, since=since, in_flight=2)
    live.report("silent", {"a": Phase.READY}, age_s=300, in_flight=40)
    live.report("well", {"a": Phase.READY}, in_flight=3)
    with live.heartbeats("down", "well"):
        page = open_page(live.url, timezone_id="UTC")
        expect(row(page, "a").get_by_role("img")).to_have_attribute(
            "aria-label", "on 4 replicas: 2 unknown, 1 ready"
        )
        cells = row(page, "a").locator(".strip i")
        assert cells.evaluate_all("all => all.map((one) => one.className)") == [
            "pR off",
            "pE",
            "pR off",
            "pR",
        ]
        hatched = cells.first.evaluate("one => getComputedStyle(one).backgroundImage")
        assert "repeating-linear-gradient" in hatched
        expect(tile(page, "Replicas ready")).to_have_text("2 / 4")
        expect(tile(page, "Requests in flight")).to_have_text("5")
        expect(page.locator("#replicas tr").filter(has_text="silent").locator("td").first).to_have_text("–")
        expect(page.get_by_text("2 of 4 replicas not ready")).to_be_visible()
        engine = "Engine unreachable on down since 2020-02-03 18:47: connection refused"
        expect(page.get_by_text(engine)).to_be_visible()
        expect(page.get_by_text("No report from silent since")).to_be_visible()
        live.report("down", {"a": Phase.READY})
        expect(row(page, "a").get_by_role("img")).to_have_attribute(
            "aria-label", "on 4 replicas: 1 unknown, 2 ready"
        )
        expect(page.get_by_text("Engine unreachable")).to_have_count(0)


def test_hit_rates_say_whose_and_since_when(shared: Live, open_page: Open) -> None:
    """One is of the fleet since its start, the other one of this replica in the last hour."""
    page = open_page(shared.url)
    expect(tile(page, "Hit rate: fleet, since start")).to_have_text("90.0 %")
    expect(page.get_by_text("Hit rate: this replica, last hour")).to_be_visible()


def test_search_filter_and_sort(shared: Live, open_page: Open) -> None:
    """By words, by phase, by replica; the address keeps them for whom it is sent to."""
    page = open_page(shared.url)
    expect(row(page, "support")).to_be_visible()
    rows = page.locator("#scroll .row:visible")
    page.get_by_role("searchbox").fill("FINANCE bill")
    expect(rows).to_have_count(1)
    expect(page.locator("#shown")).to_have_text("1 of 4")
    page.keyboard.press("Escape")
    expect(rows).to_have_count(4)
    page.get_by_role("button", name="Failed 1").click()
    expect(rows.locator(".c-adapter")).to_have_text(["sql"])
    page.get_by_role("button", name="All 4").click()
    page.get_by_role("button", name="other-1: ready").click()
    expect(rows.locator(".c-adapter")).to_have_text(["support", "billing"])
    again = open_page(page.url)
    expect(again.locator("#scroll .row:visible .c-adapter")).to_have_text(["support", "billing"])
    page.keyboard.press("Escape")
    page.get_by_role("columnheader", name="Adapter").get_by_role("button").click()
    expect(rows.locator(".c-adapter").first).to_have_text("billing")
    expect(page.get_by_role("columnheader", name="Adapter")).to_have_attribute("aria-sort", "ascending")


def test_on_a_telephone(shared: Live, open_page: Open) -> None:
    """At 390 px an adapter's state is in sight without scrolling, and details open where one is."""
    page = open_page(shared.url)
    page.set_viewport_size({"width": 390, "height": 844})
    state = row(page, "sql").locator(".c-state")
    expect(state).to_have_text("1 failed")
    expect(state).to_be_in_viewport(ratio=1)
    row(page, "sql").click()
    details = page.get_by_role("complementary", name="sql")
    expect(details.get_by_role("heading", name="sql")).to_be_in_viewport(ratio=1)
    expect(details).to_contain_text("the bytes are not <b>whole</b>")
    assert page.evaluate("[scrollX, scrollY]") == [0, 0]
    page.get_by_role("button", name="Close details").click()
    expect(state).to_be_in_viewport(ratio=1)


def test_a_canary_and_the_revisions_are_shown(live: Live, open_page: Open) -> None:
    """Which revision serves and which is tried, the share of each, and when each was registered by whom."""
    live.register("a")
    live.revise("a", activate=False)
    release.set_canary(live.registry, SCOPE, "a", "v2", 20, writer="test")
    asked = {"model": "a", "prompt": "x"}
    counts = {
        "default/tiny/v1/a": RevisionUsage(requests=400, loads=1, load_seconds=0.5),
        "default/tiny/v2/a": RevisionUsage(requests=97, errors_4xx=1, errors_5xx=3),
    }
    live.report("other", {}, usage=counts)
    page = open_page(live.url, permissions=["clipboard-read", "clipboard-write"])
    expect(row(page, "a")).to_be_visible()
    for _ in range(3):
        httpx.post(f"{live.url}/v1/completions", json=asked, timeout=60)
    row(page, "a").click()
    details = page.get_by_role("complementary", name="a", exact=True)
    expect(details.get_by_role("heading", name="Canary: v1 → v2")).to_be_visible()
    expect(details.locator(".lane")).to_contain_text("v1 · 80 %")
    expect(details.locator(".lane")).to_contain_text("v2 · 20 %")
    numbers = [int(one.split()[0]) for one in details.locator(".lane span").all_text_contents()]
    assert sum(numbers) == 500, "3 of this replica, and those that the other one reports"
    assert (numbers[0] >= 400, numbers[1] >= 97) == (True, True)
    errors = [int(one.split()[0]) for one in details.locator(".lane em").all_text_contents() if one[0] != "n"]
    assert sum(errors) == 7, "no engine answers here: each of the 3 is an error"
    expect(details.locator(".lane .canary em")).to_contain_text(
        re.compile(r"^[4-7] errors \(.* %\): 1 of 4xx, \d of 5xx$")
    )
    expect(details.locator(".revisions li")).to_contain_text(["v2 canary", "v1 serves"])
    expect(details.locator(".revisions li").first).to_contain_text("by another")
    expect(details.locator(".revisions li").last).to_contain_text(re.compile(r"40\d requests.*load \d+ ms"))
    copy = details.get_by_role("button", name="Copy lora-fs status a -n default")
    copy.click()
    expect(copy).to_have_text("Copied")
    live.report("other", {"a": Phase.FAILED}, "drawn anew")
    expect(details).to_contain_text("drawn anew")
    expect(copy).to_have_text("Copied")
    expect(copy).to_be_focused()
    assert page.evaluate("navigator.clipboard.readText()") == "lora-fs status a -n default"


def test_evaluations_and_effect_are_shown(live: Live, open_page: Open) -> None:
    """Each revision has its newest evaluation, or why it cannot be read; replicas say if it does anything."""
    live.register("a")
    for revision, rate, against in (("v2", 0.95, "v1"), ("v3", 0.8, None), ("v4", 1.0, None)):
        live.revise("a", activate=False, seed=int(revision[1:]))
        measured = {"baseline": Measured(revision=against, digest=DIGEST, figures={})} if against else {}
        file = live.evaluate("a", revision, rate, "pass_rate>=0.9", **measured)
    file.write_text("{}", encoding="utf-8")
    live.report("other", {"a": Phase.READY}, effect="none")
    page = open_page(live.url)
    row(page, "a").click()
    details = page.get_by_role("complementary", name="a", exact=True)
    lines = details.locator(".revisions li")
    expect(lines).to_have_count(4)
    expect(lines.filter(has_text="v1 serves").locator(".evaluation")).to_have_text("not evaluated")
    passed, failed, broken = (lines.filter(has_text=one).locator(".evaluation") for one in ("v2", "v3", "v4"))
    expect(passed).to_have_text(
        "passed pass_rate>=0.9 · 200 cases of cases.jsonl, against v1 · pass_rate 0.95"
    )
    expect(passed).to_have_class("evaluation passed")
    expect(failed).to_contain_text("failed pass_rate>=0.9 · pass_rate>=0.9: pass_rate is 0.8")
    expect(failed).to_have_class("evaluation failed")
    expect(broken).to_contain_text("its evaluation cannot be read")
    expect(details).to_contain_text("none: it answers as the base model does (other)")
    assert violations(page) == []


def test_an_adapters_requests_and_load_time_are_shown(live: Live, open_page: Open) -> None:
    """Of the fleet, in the row and to sort by; ≥ where a replica has more counts than its report takes."""
    live.register("a")
    live.register("b")
    for replica in ("one", "two"):
        usage = {"default/tiny/v1/a": RevisionUsage(requests=617, errors_5xx=1, loads=2, load_seconds=3.0)}
        live.report(replica, {"a": Phase.READY}, usage=usage)
    with live.heartbeats():
        page = open_page(live.url)
        expect(row(page, "a").locator(".c-requests")).to_have_text("1,234")
        expect(row(page, "a").locator(".c-requests")).to_have_attribute(
            "title", "2 of them answered with an error"
        )
        expect(row(page, "a").locator(".c-load")).to_have_text("1.5 s")
        expect(row(page, "b").locator(".c-requests")).to_have_text("–")
        page.get_by_role("columnheader", name="Adapter").get_by_role("button").click()
        page.get_by_role("columnheader", name="Adapter").get_by_role("button").click()
        expect(page.locator("#scroll .row:visible .c-adapter").first).to_have_text("b")
        page.get_by_role("columnheader", name="Requests").get_by_role("button").click()
        expect(page.locator("#scroll .row:visible .c-adapter").first).to_have_text("a")
        live.report(
            "two",
            {"a": Phase.READY},
            usage={"default/tiny/v1/a": RevisionUsage(requests=3)},
            usage_left_out=9,
        )
        expect(row(page, "a").locator(".c-requests")).to_have_text("≥ 620")


def test_events_are_grouped(live: Live, open_page: Open) -> None:
    """Those of one reason are one line, with their number and some of the names."""
    page = open_page(live.url)
    expect(page.locator("#events")).to_contain_text("none")
    for name in ("a", "b", "c", "d", "e"):
        live.register(name)
    lines = page.locator("#events li")
    expect(lines.filter(has_text="Registered")).to_have_count(1)
    expect(lines.filter(has_text="Registered")).to_contain_text("×5")
    expect(lines.filter(has_text="Registered")).to_contain_text("and 2 more")


def is_refused(live: Live, name: str) -> bool:
    """Whether the replica, which may not have seen the registration yet, tried to load it."""
    answer = httpx.post(f"{live.url}/v1/completions", json={"model": name, "prompt": "x"}, timeout=60)
    assert answer.is_error
    return f"{name} does not fit" in answer.text


def test_a_failure_outlives_a_flood_of_events(live: Live, open_page: Open) -> None:
    """Each adapter that fails keeps its own line, after more events than a replica keeps."""
    for name in ("bad", "worse"):
        live.engine.refuses[name] = EngineRejected(f"{name} does not fit", reason="rank")
        live.register(name)
        wait_until(f"{name} is refused", partial(is_refused, live, name), timeout_s=60)
    for number in range(KEPT):
        live.register(f"a{number}")
    page = open_page(live.url)
    lines = page.locator("#events li")
    registered = lines.filter(has_text="Registered")
    expect(registered).to_contain_text(re.compile(r"a127.* and \d+ more"))
    expect(registered).to_have_count(1)
    failures = page.locator("#events li.warning")
    expect(failures.filter(has_text="does not fit")).to_have_count(2)
    expect(failures.filter(has_text="bad does not fit")).to_have_count(1)
    expect(failures.filter(has_text="worse does not fit")).to_have_count(1)
    expect(page.locator("#incident")).to_have_text("2 adapters failing")


def test_the_axis_fits_the_data(live: Live, open_page: Open) -> None:
    """A replica that just started has a plot of its minutes, not of an hour."""
    page = open_page(live.url)
    expect(page.locator("#plots .axis")).to_have_text(re.compile(r"^(\d+ s|2 min) ?ago.*now$"))
    expect(page.locator("#plots .axis")).not_to_contain_text("1 h")


def test_by_keyboard(shared: Live, open_page: Open) -> None:
    """Search, walk the rows, open one, read it, and come back to where one was."""
    page = open_page(shared.url)
    expect(row(page, "sql")).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("s")
    page.keyboard.press("Enter")
    grid = page.get_by_role("grid")
    expect(grid).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    active = grid.get_attribute("aria-activedescendant")
    expect(page.locator(f"#{active}")).to_have_attribute("aria-selected", "true")
    expect(page.locator(f"#{active}")).to_contain_text("sql")
    page.keyboard.press("Enter")
    details = page.get_by_role("complementary", name="sql")
    expect(details.get_by_role("heading", name="sql")).to_be_focused()
    there = details.get_by_role("row", name="other-0 Failed")
    expect(there).to_contain_text("the bytes are not <b>whole</b>")
    expect(details).to_contain_text("rank 4")
    page.keyboard.press("Escape")
    expect(details).to_be_hidden()
    expect(grid).to_be_focused()


def test_ten_thousand_rows(open_page: Open) -> None:
    """A screenful of them are elements; the last one is a key away; a search leaves what matches."""
    many = {f"a{number:05d}": Phase.UNLOADED for number in range(10_000)}
    replica = FakeReplica((*many, "b"), phases=many)
    with serving(create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None))) as url:
        page = open_page(f"{url}/#sort=name")
        expect(row(page, "a00000")).to_be_visible()
        assert page.locator("#scroll .row").count() < 80
        expect(page.get_by_role("grid")).to_have_attribute("aria-rowcount", "10002")
        page.get_by_role("grid").focus()
        page.keyboard.press("End")
        expect(row(page, "b")).to_have_attribute("aria-rowindex", "10002")
        page.get_by_role("searchbox").fill("a0999")
        expect(page.locator("#scroll .row:visible")).to_have_count(10)
        page.context.close()


def test_a_link_with_a_phases_earlier_name(open_page: Open) -> None:
    """A bookmark that asked for evicted adapters shows the unloaded ones, by that name."""
    replica = FakeReplica(("a", "b"), phases={"a": Phase.UNLOADED})
    with serving(create_app(replica, engine_url="http://127.0.0.1:9", admin=Admin(None))) as url:
        page = open_page(f"{url}/#kind=evicted")
        expect(row(page, "a")).to_be_visible()
        expect(row(page, "a")).to_contain_text("unloaded")
        expect(row(page, "b")).to_have_count(0)
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(shared: Live, open_page: Open, scheme: str) -> None:
    """The system's is taken, and the other one by a button that is remembered."""
    page = open_page(shared.url, color_scheme=scheme)
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    first = page.evaluate(colour)
    page.get_by_role("button", name="Dark or light").click()
    second = page.evaluate(colour)
    dark, light = "rgb(14, 18, 24)", "rgb(245, 246, 249)"
    assert (first, second) == ((dark, light) if scheme == "dark" else (light, dark))
    page.reload()
    assert page.evaluate(colour) == second


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessible(shared: Live, open_page: Open, scheme: str) -> None:
    """axe finds nothing in either theme: rows, details and the token's dialog."""
    page = open_page(shared.url, color_scheme=scheme)
    expect(row(page, "sql")).to_be_visible()
    assert violations(page) == []
    row(page, "sql").click()
    expect(page.get_by_role("complementary", name="sql").get_by_role("table")).to_be_visible()
    assert violations(page) == []
    page.get_by_role("button", name="Token").click()
    assert violations(page) == []


def test_a_token_is_asked_for_and_kept_to_the_tab(tmp_path: Path, open_page: Open) -> None:
    """Without one public namespaces alone are shown; it travels in a header, and never in an address."""
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret-of-ops name=ops\n")
    with sidecar(tmp_path, Admin(tokens, ("-",))) as live:
        live.register("private")
        page = open_page(live.url)
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        expect(page.get_by_text("Public namespaces are shown")).to_be_visible()
        expect(page.locator("#scroll .row:visible")).to_have_count(0)
        page.get_by_role("button", name="Token").click()
        page.get_by_label("A token that may read").fill("s3cret-of-ops")
        page.get_by_role("button", name="Use").click()
        expect(row(page, "private")).to_be_visible()
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert not any("s3cret" in url for url in [*asked, page.url])
        page.get_by_role("button", name="Token").click()
        page.get_by_role("button", name="Forget").click()
        expect(row(page, "private")).to_have_count(0)
        assert page.evaluate("sessionStorage.length") == 0
        page.context.close()


def test_a_token_that_is_missing_or_wrong_is_told(tmp_path: Path, open_page: Open) -> None:
    """The page says which of both it is: it is not live then, and does not say that nothing is registered."""
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret-of-ops name=ops\n")
    with sidecar(tmp_path, Admin(tokens, ("-",))) as live:
        live.register("private")
        page = open_page(live.url)
        expect(page.locator("#live-text")).to_have_text("public only")
        expect(page.locator("#empty")).to_contain_text("Nothing is public here")
        page.get_by_role("button", name="Token").click()
        page.get_by_label("A token that may read").fill("a-typing-error")
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#live-text")).to_have_text("wrong token")
        expect(page.locator("#problem")).to_contain_text("This sidecar does not know the token")
        expect(page.locator("#empty")).to_contain_text("the token is not known")
        page.context.close()


def test_a_sidecar_that_ends_is_told(tmp_path: Path, open_page: Open) -> None:
    """What was seen stays, and the page says that it is not live."""
    with sidecar(tmp_path) as live:
        live.register("a")
        page = open_page(live.url, quiet=False)
        expect(row(page, "a")).to_be_visible()
        expect(page.locator("#live")).to_have_attribute("data-state", "live")
    expect(page.locator("#live")).to_have_attribute("data-state", "lost")
    expect(row(page, "a")).to_be_visible()


def test_details_that_cannot_be_read_say_why(tmp_path: Path, open_page: Open) -> None:
    """A sidecar that cannot tell now, one that is gone, and an adapter that is: each has its own sentence."""
    tokens = tmp_path / "tokens"
    tokens.write_text("s3cret-of-ops name=ops\n")
    with sidecar(tmp_path, Admin(tokens, ("-",))) as live:
        live.register("a")
        page = open_page(live.url, quiet=False)
        page.get_by_role("button", name="Token").click()
        page.get_by_label("A token that may read").fill("s3cret-of-ops")
        page.get_by_role("button", name="Use").click()
        expect(row(page, "a")).to_be_visible()
        tokens.rename(tmp_path / "away")
        bearer = {"Authorization": "Bearer s3cret-of-ops"}
        adapter = f"{live.url}/v1/dashboard/adapters/a"
        wait_until(
            "it is seen", lambda: httpx.get(adapter, headers=bearer, **LOCAL).status_code == 503, timeout_s=60
        )
        row(page, "a").click()
        expect(page.locator("#details-body")).to_contain_text("This sidecar answers 503: the token file")
        live.register("b")  # ends the wait of the page's other read
        expect(page.locator("#problem")).to_contain_text("This sidecar answers 503: the token file")
        expect(page.locator("#live-text")).to_have_text("answers 503")
        (tmp_path / "away").rename(tokens)
        expect(page.locator("#details-body")).to_contain_text("Serves")
        expect(page.locator("#problem")).to_be_hidden()
        live.unregister("a")
        expect(page.locator("#details-body")).to_have_text("It is not registered any more.")
        page.get_by_role("button", name="Close details").click()
    expect(page.locator("#problem")).to_contain_text("This sidecar does not answer")
    row(page, "b").click()
    expect(page.locator("#details-body")).to_have_text("This sidecar does not answer")


def until_held(page: Page, held: list[Any], many: int) -> None:
    """Wait until so many requests are held back; only while the page waits do they come."""
    for _ in range(WITHIN_MS // 20):
        if len(held) >= many:
            return
        page.wait_for_timeout(20)
    raise AssertionError(f"{len(held)} of {many} requests came")


def test_late_details_of_another_adapter_are_not_drawn(shared: Live, open_page: Open) -> None:
    """An answer that comes after its adapter was closed changes neither the open one nor the focus."""
    page = open_page(shared.url, quiet=False)
    held = list[Any]()
    page.route("**/v1/dashboard/adapters/sql", lambda route: held.append(route))
    body, title = page.locator("#details-body"), page.locator("#details-title")
    for late in ("continue_", "abort"):
        row(page, "sql").click()
        expect(title).to_have_text("sql")
        until_held(page, held, 1)
        page.get_by_role("button", name="Close details").click()
        row(page, "billing").click()
        expect(body).to_contain_text("lora-fs show billing")
        page.get_by_role("button", name="Copy lora-fs show billing").focus()
        for route in held:
            getattr(route, late)()
        held.clear()
        page.wait_for_timeout(500)
        expect(title).to_have_text("billing")
        expect(body).to_contain_text("lora-fs show billing")
        assert "sql" not in body.inner_text()
        expect(page.get_by_role("button", name="Copy lora-fs show billing")).to_be_focused()
        page.get_by_role("button", name="Close details").click()


def test_slow_details_are_drawn_though_newer_ones_are_asked_for(live: Live, open_page: Open) -> None:
    """An adapter is shown though it changes faster than its details are read."""
    live.register("busy")
    page = open_page(live.url)
    held = list[Any]()
    page.route("**/v1/dashboard/adapters/busy", lambda route: held.append(route))
    row(page, "busy").click()
    until_held(page, held, 1)
    old = held[0].fetch()
    live.report("other", {"busy": Phase.FAILED}, "torn")
    until_held(page, held, 2)
    held[0].fulfill(response=old)
    expect(page.locator("#details-body")).to_contain_text("lora-fs show busy")
    held[-1].continue_()
    expect(page.locator("#details-body")).to_contain_text("torn")


def test_details_that_are_refused_say_so(shared: Live, open_page: Open) -> None:
    """As vLLM refuses them, whose `--api-key` the plugin's dashboard needs."""
    page = open_page(shared.url, quiet=False)
    refusal = {"status": 401, "json": {"error": "Unauthorized"}}
    page.route("**/v1/dashboard/adapters/**", lambda route: route.fulfill(**refusal))
    row(page, "sql").click()
    expect(page.locator("#details-body")).to_have_text("A token is needed: HTTP 401")


def test_nothing_from_elsewhere_can_run(shared: Live, open_page: Open) -> None:
    """The policy refuses scripts in the page, markup from text, other hosts and frames."""
    page = open_page(shared.url, quiet=False)
    tried = page.evaluate(
        """async () => {
          const found = [];
          try { document.body.innerHTML = '<p>x</p>'; found.push('markup'); } catch {}
          try { await fetch('http://127.0.0.1:1/'); } catch {}
          const script = document.createElement('script');
          try { script.textContent = 'window.ran = true'; document.body.append(script); } catch {}
          if (window.ran) found.push('script');
          return found;
        }"""
    )
    assert tried == []
    policy = page.request.get(shared.url).headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none';")
    framed = page.evaluate(
        f"""() => new Promise((done) => {{
          const frame = document.createElement('iframe');
          frame.onload = () => done(frame.contentDocument === null ? 'other' : frame.contentDocument.title);
          frame.src = {json.dumps(shared.url)};
          document.body.append(frame);
        }})"""
    )
    assert "lora-fs" not in framed
