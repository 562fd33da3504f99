"""The loader: who loads does not wait, and what came of it is told once."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lora_fs.worker_patch.worker.load.loader import NICENESS, THREADS, Done, Loader


@pytest.fixture
def loader() -> Loader[str]:
    return Loader()


def collected(loader: Loader[str]) -> Done[str]:
    """The one load that ended."""
    deadline = threading.Event()
    while not (ended := loader.collect()):
        assert not deadline.wait(0.002)
    [done] = ended
    return done


def test_a_load_is_started_once_and_told_once(loader: Loader[str]) -> None:
    go, ran = threading.Event(), []

    def prepare() -> str:
        ran.append(1)
        assert go.wait(20)
        return "weights"

    for _ in range(32):
        loader.start(7, prepare)
    assert loader.collect() == []
    go.set()
    done = collected(loader)
    assert (done.id, done.adapter, done.reason, ran) == (7, "weights", "", [1])
    assert loader.collect() == []


def test_what_fails_beside_the_loads_is_told(loader: Loader[str], caplog: pytest.LogCaptureFixture) -> None:
    """In the log, and no load is hurt."""

    def fail() -> None:
        raise OSError("no memory")

    loader.later(fail)
    loader.start(7, lambda: "weights")
    assert collected(loader).adapter == "weights"
    loader._threads.shutdown()
    assert "no memory" in caplog.text


def test_without_a_thread_for_it_nobody_fails(
    loader: Loader[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who asks for it has loads to take in, which nobody else ever would."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    loader.later(lambda: None)
    assert "can't start new thread" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("rank 64"), "rank 64"),
        (KeyError(), "KeyError"),
        (ValueError("q" * 1_000_000), "q" * 1_000),  # as vLLM's that names every module of an adapter
        (ValueError("no layer é\ud800"), "no layer é\\ud800"),  # a pickle's name; vLLM's messages are UTF-8
    ],
    ids=["a word", "none", "a million characters", "half a character"],
)
def test_a_failure_is_told_with_its_reason(
    loader: Loader[str], error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def prepare() -> str:
        raise error

    loader.start(7, prepare)
    done = collected(loader)
    assert (done.adapter, done.reason) == (None, reason)
    assert f"adapter 7 is not loaded: {repr(error)[:1_000]}" in caplog.messages


def test_a_stuck_load_delays_no_other(loader: Loader[str]) -> None:
    go = threading.Event()

    def stuck() -> str:
        assert go.wait(20)
        return "late"

    loader.start(1, stuck)
    loader.start(2, lambda: "now")
    assert collected(loader).id == 2
    go.set()
    assert collected(loader).id == 1


def test_a_load_that_nobody_wants_any_more(loader: Loader[str]) -> None:
    """One that waits for a thread does not begin, and what the others bring is dropped."""
    usual, go, ran = sys.getswitchinterval(), threading.Event(), list[int]()
    running = range(THREADS + 1)
    for adapter in running:
        loader.start(adapter, lambda: str(go.wait(20)))

    def run() -> str:
        ran.append(9)
        return "weights"

    loader.start(9, run)
    for adapter in (*running, 9, 9):
        loader.forget(adapter)
    assert sys.getswitchinterval() == usual
    go.set()
    loader._threads.shutdown()
    assert (ran, loader.collect()) == ([], [])


def test_who_waits_for_a_load_has_it(loader: Loader[str]) -> None:
    """Or waits as long as it said, and for none that is not there."""
    go = threading.Event()
    loader.start(1, lambda: str(go.wait(20)))
    assert not loader.wait(1, 0)
    assert loader.collect() == []
    go.set()
    assert loader.wait(1, 60)
    [done] = loader.collect()
    assert (done.id, done.adapter) == (1, "True")
    assert loader.wait(1, 60)


def test_the_interpreters_lock_changes_hands_sooner_while_loading(loader: Loader[str]) -> None:
    """And as before once nothing is loaded, also after a failure."""
    usual, go = sys.getswitchinterval(), threading.Event()
    loader.start(1, lambda: str(go.wait(20)))
    loader.start(2, lambda: list[str]()[0])
    assert sys.getswitchinterval() < usual
    assert collected(loader).id == 2
    assert sys.getswitchinterval() < usual
    go.set()
    assert collected(loader).id == 1
    assert sys.getswitchinterval() == usual


# vLLM's two ways to bind a CPU worker's threads: by torch's own OpenMP, and by Intel's, which it recommends.
FIRST = min(os.sched_getaffinity(0))
BOUND = {"gomp": {"GOMP_CPU_AFFINITY": str(FIRST)}}
INTEL = Path(sys.prefix, "lib", "libiomp5.so")
if INTEL.exists():  # vLLM installs it on x86
    explicit = f"granularity=fine,explicit,proclist=[{FIRST}]"
    BOUND["intel"] = {"KMP_AFFINITY": explicit, "LD_PRELOAD": str(INTEL)}


USUAL = os.sched_getaffinity(0)


@pytest.mark.parametrize("env", BOUND.values(), ids=BOUND)
def test_who_loads_steps_aside(env: dict[str, str]) -> None:
    """A worker's own thread is bound to a processor; who loads runs on others, and comes second there."""
    check_where_they_run(env, USUAL - {FIRST} or USUAL)


def test_who_loads_is_not_bound_by_an_operators_own_way() -> None:
    """Which processors steps have is not known then; that one is not the only one is."""
    check_where_they_run({"GOMP_CPU_AFFINITY": f"{FIRST}-{FIRST}"}, USUAL)


def check_where_they_run(env: dict[str, str], loading_on: set[int]) -> None:
    """Of a worker that is started with ``env``: its own thread, bound to the first, and one that loads."""
    ran = subprocess.run(
        [sys.executable, "-P", __file__],
        env={**os.environ, **env, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    own, loading = json.loads(ran.stdout)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    later = min(19, usual + NICENESS) if sys.platform == "linux" else usual
    assert own == {"processors": [FIRST], "threads": 2, "niceness": usual}
    assert loading == {"processors": sorted(loading_on), "threads": 1, "niceness": later}


def _worker() -> None:
    own = _how_it_runs()
    loader: Loader[dict[str, object]] = Loader()
    loader.start(1, _how_it_runs)
    while not (ended := loader.collect()):
        time.sleep(0.002)
    print(json.dumps([own, ended[0].adapter]))


def _how_it_runs() -> dict[str, object]:
    import torch

    torch.ones(1 << 20).sum()
    return {
        "processors": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "niceness": os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
    }


if __name__ == "__main__":
    # As vLLM starts a worker: by a process that is not bound.
    multiprocessing.get_context("spawn").Process(target=_worker).start()
