"""A stock engine has no more adapters than it keeps in memory, and reads none of them in a step.

Nothing sets ``--max-loaded`` unless a test says so. What the engine keeps in memory is less than there are
adapters. Whatever becomes of the staged copies, the engine serves on.
"""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import openai
import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.replica import PROMPT, SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import NeverHappened, wait_until

NAMES = tuple(f"tenant-{number}" for number in range(6))
TOKENS = 60

Start = Callable[..., AbstractContextManager[SidecarReplica]]


@pytest.fixture
def start(farm: EngineFarm, model_dir: Path, adapters: Callable[[int], Path], tmp_path: Path) -> Start:
    """``with start(max_loras, max_cpu_loras, **settings)``: a sidecar's replica with six adapters."""

    @contextmanager
    def run(max_loras: int, max_cpu_loras: int, **settings: str) -> Iterator[SidecarReplica]:
        volume = Volume(tmp_path / "volume", MODEL_NAME, cwd=model_dir.parent)
        volume.root.mkdir()
        volume.run("init")
        bounds = ("--max-loras", str(max_loras), "--max-cpu-loras", str(max_cpu_loras))
        replica = SidecarReplica(
            "bounded",
            farm,
            model_dir,
            volume,
            tmp_path,
            engine_args=bounds,
            settings={"stage_ahead": "off", **settings},
        )
        with closing(replica):
            replica.wait_ready()
            for seed, name in enumerate(NAMES, start=21):
                volume.run("register", name, str(adapters(seed)), "--wait", "20")
            yield replica

    return run


def damage(replica: SidecarReplica, name: str, *, removed: bool) -> None:
    """Remove a staged copy, or put short weights in their place; it may not be there.

    They are not cut short in place. An engine that has the file mapped at that moment would be killed
    (SIGBUS), and nothing beside it could help.
    """
    for copy in replica.stage_dir.glob(f"*/{name}"):
        weights = copy / "adapter_model.safetensors"
        try:
            for path in (copy, weights):
                path.chmod(0o700)  # they are read-only
            if removed:
                shutil.rmtree(copy)
            else:
                short = copy / "short"
                short.write_bytes(weights.read_bytes()[:1000])
                short.replace(weights)
        except FileNotFoundError:
            continue  # it made room meanwhile


def stream(replica: SidecarReplica, name: str) -> str:
    """A long answer, token by token; or the error."""
    try:
        pieces = replica.openai.completions.create(
            model=name, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True
        )
        return "".join(piece.choices[0].text for piece in pieces if piece.choices)
    except openai.APIStatusError as error:
        return f"error {error.status_code}: {error.message}"


@pytest.mark.parametrize("max_loras", [2, 4])
def test_copies_damaged_under_streams(start: Start, max_loras: int) -> None:
    """Streams of six adapters over fewer places, while copies are damaged: all are served, and right.

    The engine keeps twice as many as one batch may mix. If it kept no more, it might drop one that runs: in
    vLLM's order one that a stream has just left is no older than the others of that step.
    """
    with start(max_loras, 2 * max_loras) as replica:
        expected = {name: stream(replica, name) for name in NAMES}
        assert len(set(expected.values())) == len(NAMES)
        told: dict[str, list[str]] = {name: [] for name in NAMES}
        ending = threading.Event()

        def ask(name: str) -> None:
            while not ending.is_set():
                told[name].append(stream(replica, name))

        def right() -> dict[str, int]:
            return {name: texts.count(expected[name]) for name, texts in told.items()}

        def damage_all(*, removed: bool) -> None:
            before = right()
            for name in NAMES:
                damage(replica, name, removed=removed)
            try:
                wait_until(
                    "all are right once more",
                    lambda: all(count > before[name] for name, count in right().items()),
                    timeout_s=60,
                )
            except NeverHappened:
                others = {
                    n: Counter(text[-200:] for text in t if text != expected[n]) for n, t in told.items()
                }
                log = replica.engine_names(), replica.http.get("/readyz").json()["conditions"]
                pytest.fail(f"{before} -> {right()}, others {others}, loaded and conditions {log}")

        threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        try:
            for removed in (False, True):
                damage_all(removed=removed)
                assert len(replica.engine_names() - {MODEL_NAME}) <= max_loras
        finally:
            ending.set()
            for thread in threads:
                thread.join(60)
        assert replica.engine.alive
        others = {text for name, texts in told.items() for text in texts} - set(expected.values())
        # One that is damaged between its check and its load is refused; the next request checks it again.
        assert all("refused to load" in text for text in others), others
        assert all(set(texts) <= {expected[name]} | others for name, texts in told.items())
        ready = replica.http.get("/readyz").json()
        assert (ready["ready"], ready["conditions"]) == (True, [])


@pytest.mark.parametrize("bound", [{"max_loaded": "2"}, {}], ids=["set", "learned"])
def test_an_unloaded_adapter_keeps_its_place_in_the_engine(start: Start, bound: dict[str, str]) -> None:
    """It pushes another out of vLLM's memory, which is then loaded anew and not read in a step."""
    with start(2, 2, **bound) as replica:
        first = replica.answer(NAMES[0])
        replica.answer(NAMES[1])
        replica.volume.run("unregister", NAMES[1], "--wait", "20")
        wait_until("it is unloaded", lambda: NAMES[1] not in replica.engine_names(), timeout_s=60)
        replica.answer(NAMES[2])  # vLLM drops the first, though two are loaded
        assert replica.engine_names() >= {NAMES[0], NAMES[2]}
        damage(replica, NAMES[0], removed=False)
        assert replica.answer(NAMES[0]) == first
        assert replica.engine.alive
