"""`lora-fs gateway` as a process, before real sidecars with stand-ins for engines, on real sockets."""

from __future__ import annotations

import concurrent.futures
import http.server
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL, Process, free_port, spawn
from lora_fs.sidecar.gateway.forward import MOST_NAME
from tests.gateway.conftest import Stubs, stubs
from tests.gateway.forks import Forks

Complete = Callable[..., httpx.Response]
UNTIL_S = 60.0


def until(holds: Callable[[], bool], within_s: float = UNTIL_S) -> None:
    """Poll until ``holds``."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < within_s, "it does not come true"
        time.sleep(0.02)


def health(gateway: Process) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{gateway.url}/health", **LOCAL).json()
    return told


def ready(gateway: Process) -> list[str]:
    ready: list[str] = health(gateway)["ready"]
    return ready


def started(fleet: Stubs, *options: str, replicas: int, **env: str) -> Process:
    gateway = fleet.gateway(*options, **env)
    gateway.wait_ready("/health")
    until(lambda: len(ready(gateway)) == replicas)
    return gateway


def metric(gateway: Process, series: str) -> float:
    text = httpx.get(f"{gateway.url}/metrics", **LOCAL).text
    return next((float(line.split()[-1]) for line in text.splitlines() if line.startswith(series)), 0.0)


def test_each_adapter_is_loaded_once_in_the_fleet(fleet: Stubs, complete: Complete) -> None:
    """A gateway that finds its replicas in the registry sends an adapter's requests to one of them.

    On a busy machine a replica may be out for a moment; the other one then loads its adapters.
    """
    fleet.start = spawn  # by the script, as users do
    fleet.add()
    fleet.add()
    gateway = started(fleet, replicas=2)
    for _ in range(3):
        for number in range(6):
            answer = complete(gateway.url, f"a{number}")
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == f"a{number}"
            assert answer.headers["x-lora-fs-adapter"] == f"default/tiny/v1/a{number}"
    log = gateway.log_text()
    loads = sum(fleet.counts(number)["loads"] for number in (0, 1))
    assert 6 <= loads <= 6 * (1 + log.count(" is out: ")), log
    assert all(fleet.counts(number)["loads"] for number in (0, 1))
    assert complete(gateway.url, "tiny").status_code == 200
    assert complete(gateway.url, "nobody").status_code == 404
    models = {card["id"] for card in httpx.get(f"{gateway.url}/v1/models", **LOCAL).json()["data"]}
    assert models >= {"tiny", *(f"a{number}" for number in range(8))}
    assert metric(gateway, 'lora_fs_gateway_choices_total{reason="cold"}') >= 6
    assert metric(gateway, 'lora_fs_gateway_choices_total{reason="base"}') >= 1


def test_a_stream_passes_as_it_comes_and_a_client_that_leaves_frees_the_engine(fleet: Stubs) -> None:
    """Events are not gathered: an answer that goes on has begun. The engine's request ends after its client
    left."""
    fleet.add(each_s=0.1)
    gateway = started(fleet, "--replica", fleet.sidecars[0].url, replicas=1)
    body = {"model": "a1", "prompt": "x", "stream": True, "max_tokens": 5}
    with httpx.stream("POST", f"{gateway.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *events, last = filter(None, answer.iter_lines())
    assert [json.loads(line[6:])["choices"][0]["text"] for line in events] == [
        f"{number} " for number in range(5)
    ]
    assert last == "data: [DONE]"
    with httpx.stream(
        "POST", f"{gateway.url}/v1/completions", json=body | {"max_tokens": 100_000}, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # kept: with the iterator the stream would be closed
        next(lines)
        assert fleet.counts(0)["under_way"] == 1
    until(lambda: fleet.counts(0)["under_way"] == 0)
    until(lambda: metric(gateway, "lora_fs_gateway_in_flight{") == 0)


def test_a_killed_replica_loses_only_what_it_had_begun(fleet: Stubs, complete: Complete) -> None:
    """Under load, a replica that is killed fails its own requests; it is out at once and comes back. No
    request fails that begins after the gateway has seen its end."""
    for _ in range(3):
        fleet.add(request_s=0.02)
    gateway = started(fleet, replicas=3)
    stop, answers, lock = threading.Event(), list[tuple[float, int, str]](), threading.Lock()

    def ask(worker: int) -> None:
        with httpx.Client(timeout=60) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                body = {"model": f"a{(worker + turn) % 8}", "prompt": "x"}
                began = time.monotonic()
                answer = client.post(f"{gateway.url}/v1/completions", json=body)
                with lock:
                    answers.append((began, answer.status_code, answer.text))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(ask, worker) for worker in range(6)]
        until(lambda: len(answers) > 100)
        victim, engine = fleet.sidecars[0], fleet.engines[0]
        port = httpx.URL(victim.url).port
        killed_at = time.monotonic()
        victim.kill()
        until(lambda: "r0" not in ready(gateway))
        out_at = time.monotonic()
        count = len(answers)
        until(lambda: len(answers) > count + 100)
        fleet.add(port=port, engine=engine)  # of the same address, as another pod
        came_at = time.monotonic()
        until(lambda: len(ready(gateway)) == 3)
        back_s = time.monotonic() - came_at
        count = len(answers)
        until(lambda: len(answers) > count + 50)
        stop.set()
        for worker in workers:
            worker.result()
    failed = [(began - out_at, text) for began, status, text in answers if status != 200]
    assert len(failed) <= 6, failed
    assert all("the request may have run" in text for _, text in failed), failed
    assert all(began < 0 for began, _ in failed), failed
    assert out_at - killed_at < 2
    assert back_s < 5


def test_scaling_from_two_to_four_and_back_under_load_costs_no_error(fleet: Stubs) -> None:
    """Replicas that come, and that end in good order, cost no request."""
    for _ in range(2):
        fleet.add(request_s=0.01)
    gateway = started(fleet, replicas=2)
    stop, statuses = threading.Event(), list[tuple[int, str]]()

    def ask(worker: int) -> None:
        with httpx.Client(timeout=60) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                body = {"model": f"a{(worker + turn) % 8}", "prompt": "x"}
                answer = client.post(f"{gateway.url}/v1/completions", json=body)
                statuses.append((answer.status_code, answer.text))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        workers = [pool.submit(ask, worker) for worker in range(6)]
        until(lambda: len(statuses) > 60)
        for replicas in (3, 4):
            fleet.add(request_s=0.01)
            until(lambda replicas=replicas: len(ready(gateway)) == replicas, 120)  # type: ignore[misc]
        count = len(statuses)
        until(lambda: len(statuses) > count + 100, 120)
        for process in fleet.sidecars[:2]:
            process.stop()
        until(lambda: ready(gateway) == ["r2", "r3"], 120)
        count = len(statuses)
        until(lambda: len(statuses) > count + 100, 120)
        stop.set()
        for worker in workers:
            worker.result()
    assert [one for one in statuses if one[0] != 200] == []


def test_a_hung_replica_is_left_and_its_requests_go_elsewhere(fleet: Stubs, complete: Complete) -> None:
    """A replica that takes no body is not waited for: another one answers."""
    fleet.add()
    fleet.add()
    gateway = started(fleet, replicas=2)
    assert complete(gateway.url, "a1").status_code == 200
    holder = next(number for number in (0, 1) if fleet.counts(number)["loads"])
    with fleet.sidecars[holder].paused():
        answer = complete(gateway.url, "a1")
        assert answer.status_code == 200, answer.text
        until(lambda: ready(gateway) == [f"r{1 - holder}"])
    until(lambda: len(ready(gateway)) == 2)


def test_a_ready_replica_whose_engine_fails_every_request_loses_them(
    fleet: Stubs, complete: Complete
) -> None:
    """Its adapters are answered by the other replica, and /health and the metrics say that it is ejected."""
    for _ in range(2):
        fleet.add()
    gateway = started(fleet, replicas=2)
    names = [f"a{number}" for number in range(8)]
    assert {complete(gateway.url, name).status_code for name in names} == {200}
    assert all(fleet.counts(number)["loads"] for number in (0, 1))
    httpx.post(f"{fleet.engines[0]}/fail", **LOCAL).raise_for_status()
    assert 500 in {complete(gateway.url, name).status_code for name in names}

    def are_answered() -> bool:
        """By the other replica: the engine of this one fails on, and its ejection ends and begins anew."""
        return {complete(gateway.url, name).status_code for name in names} == {200}

    until(lambda: are_answered() and list(health(gateway)["ejected"]) == ["r0"], 120)
    assert metric(gateway, "lora_fs_gateway_ejections_total") >= 1
    assert ready(gateway) == ["r0", "r1"]


def test_a_gateway_without_files_keeps_its_replicas(fleet: Stubs, complete: Complete) -> None:
    """A connection that it may not open is its own fault: requests get 503, and no replica goes out."""
    fleet.add()
    gateway = started(fleet, replicas=1)
    assert complete(gateway.url, "a0").status_code == 200
    _, hard = resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)
    assert resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE)[0] == hard, "it takes what it may have"
    used = len(os.listdir(f"/proc/{gateway.pid}/fd"))
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (used + 12, hard))

    def ask() -> tuple[int, str]:
        try:
            answer = httpx.post(f"{gateway.url}/v1/completions", json={"model": "a0", "prompt": "x"}, **LOCAL)
        except httpx.TransportError:  # not accepted
            return 0, ""
        return answer.status_code, answer.text

    httpx.post(f"{fleet.engines[0]}/hold", **LOCAL)
    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        asked = [pool.submit(ask) for _ in range(40)]
        until(lambda: any(one.done() and one.result()[0] == 503 for one in asked))
        httpx.post(f"{fleet.engines[0]}/release", **LOCAL)
    told = [one.result() for one in asked]
    refused = [text for status, text in told if status == 503]
    assert all("may open no more connections" in text for text in refused), refused
    assert complete(gateway.url, "a0").status_code == 200
    assert "is out" not in gateway.log.read_text()


def test_no_replica_is_503_and_says_why(fleet: Stubs, complete: Complete) -> None:
    """Without a replica a request is refused with Retry-After, and /health says what keeps each one out."""
    url = f"http://127.0.0.1:{free_port()}"
    gateway = fleet.gateway("--replica", url)
    until(lambda: _answers(gateway))
    until(lambda: "takes no connection" in health(gateway)["out"].get(url, ""))
    answer = complete(gateway.url, "a1")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "no replica is ready" in answer.json()["error"]["message"]
    assert metric(gateway, 'lora_fs_gateway_choices_total{reason="none"}') == 1  # what starts one from zero
    assert httpx.get(f"{gateway.url}/health", **LOCAL).status_code == 503


def _answers(gateway: Process) -> bool:
    try:
        return httpx.get(f"{gateway.url}/metrics", **LOCAL).status_code == 200
    except httpx.TransportError:
        return False


def test_what_is_no_replica_is_left_out_and_disturbs_nobody(fleet: Stubs, complete: Complete) -> None:
    """A gateway, a replica's second address, a metadata service and another server are refused by name."""
    replica = fleet.add()
    first = started(fleet, "--replica", replica.url, replicas=1)

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"replica": [')

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        second = replica.url.replace("127.0.0.1", "localhost")
        stranger = f"http://127.0.0.1:{other.server_port}"
        options = [word for url in (replica.url, first.url, second, stranger) for word in ("--replica", url)]
        gateway = started(fleet, *options, replicas=1)
        until(lambda: "is it a sidecar?" in health(gateway)["out"][first.url])
        until(lambda: "JSONDecodeError" in health(gateway)["out"][stranger])
        until(lambda: len(health(gateway)["out"]) == 3)
        assert complete(gateway.url, "a1").status_code == 200
        other.shutdown()
    looped = httpx.post(
        f"{gateway.url}/v1/completions", json={"model": "a1"}, headers={"Via": "1.1 lora-fs-gateway"}, **LOCAL
    )
    assert looped.status_code == 508
    refused = fleet.gateway("--replica", "http://169.254.169.254")
    assert refused.wait_ended(timeout_s=30)
    assert "link-local" in refused.log_text()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "no model"}', 200),
        (b'{"model": null, "prompt": "x"}', 200),
        (b'{"model": "", "prompt": "x"}', 200),
        (b'{"model": 5, "prompt": "x"}', 400),
        (b'{"model": ["a1"], "prompt": "x"}', 400),
        (b'{"model": {"id": "a1"}, "prompt": "x"}', 400),
        (b'{"model": "a1", "prompt": [1, 2, 3, "mixed"]}', 200),
        (b'{"model": "a1", "prompt": "' + b"x" * 10_000_000 + b'"}', 200),
        (b'{"model": "a1", "prompt": "' + b"x" * 70_000_000 + b'"}', 413),
        (b"[]", 400),
        (b"\xff\xfenot json", 400),
    ],
    ids=[
        *("no model", "null", "empty", "a number", "a list", "an object", "mixed prompt", "10 MB", "70 MB"),
        *("no object", "no JSON"),
    ],
)
def test_odd_requests_get_a_clear_answer(odd: Process, body: bytes, status: int, complete: Complete) -> None:
    """What a client sends wrong is the engine's to refuse, or too large; the next request is answered."""
    sent = httpx.post(
        f"{odd.url}/v1/completions",
        content=body,
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert sent.status_code == status, sent.text
    if status != 200:
        assert {"message", "type", "code"} <= sent.json()["error"].keys()
    assert complete(odd.url, "a1").status_code == 200


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Process]:
    """A gateway before one replica, which all odd requests are sent to, one after another."""
    with stubs(tmp_path_factory.mktemp("odd"), forks) as fleet:
        fleet.add()
        yield started(fleet, replicas=1)


def test_a_name_that_no_adapter_can_have_is_kept_nowhere(odd: Process, complete: Complete) -> None:
    """Clients may send names of 64 KiB without end: the replica answers 404, and no demand is counted."""
    series = [f'lora_fs_gateway_choices_total{{reason="{reason}"}}' for reason in ("base", "cold")]
    base, cold = (metric(odd, one) for one in series)
    assert complete(odd.url, "x" * (MOST_NAME + 1)).status_code == 404
    assert [metric(odd, one) for one in series] == [base + 1, cold]
    assert complete(odd.url, "x" * MOST_NAME).status_code == 404
    assert [metric(odd, one) for one in series] == [base + 1, cold + 1]


def test_tokens_go_on_to_the_replica_which_checks_them(fleet: Stubs, tmp_path: Path) -> None:
    """The client's own credentials reach the replica as they are."""
    fleet.add()
    gateway = started(fleet, replicas=1)
    wrong = httpx.post(
        f"{gateway.url}/v1/completions", json={"model": "a1"}, headers={"X-Lora-Fs-Token": "wrong"}, **LOCAL
    )
    direct = httpx.post(
        f"{fleet.sidecars[0].url}/v1/completions",
        json={"model": "a1"},
        headers={"X-Lora-Fs-Token": "wrong"},
        **LOCAL,
    )
    assert (wrong.status_code, wrong.text) == (direct.status_code, direct.text)


def test_replicas_stay_known_while_the_registry_is_gone(fleet: Stubs, complete: Complete) -> None:
    """A registry that vanishes takes no replica out of the gateway."""
    fleet.add()
    gateway = started(fleet, replicas=1)
    assert complete(gateway.url, "a1").status_code == 200
    fleet.root.rename(fleet.root.with_name("elsewhere"))
    until(lambda: bool(health(gateway)["problem"]))
    assert ready(gateway) == ["r0"]
    assert complete(gateway.url, "a1").status_code == 200
