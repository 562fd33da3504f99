"""The control plane over four real ranks: their own processes, steps that meet over gloo, notices by socket.

Without a model's forward pass. A step sums, over all ranks, what each has of its adapters.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable
from lora_fs.worker_patch.api.engine import LINGER_S, InProcess
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.managers import TieredWorkerManager
from lora_fs.worker_patch.worker.slots.steps import RETRY_STEPS
from tests.plugin.block import Make
from tests.plugin.test_engine import Site, record
from tests.plugin.test_room import Files, worker

pytestmark = pytest.mark.anyio
RANKS, ADAPTERS, STEPS = 4, 4, 30
FOR_EVER = 300.0
ROOM = 2  # adapters, whole; a share of one takes 0.55 of it


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def serve(rank: int, manager: Any, calls: Connection, meeting: Path, faults: Path) -> None:
    """Be one rank: take calls and steps in the order they come, as vLLM's worker does."""
    torch.set_num_threads(1)
    fill, prepare, models = manager._adapter_manager._fill, manager._prepare, manager._adapter_manager
    asleep = threading.Event()

    def prepare_or_fail(request: LoRARequest, **how: bool) -> Any:
        while (faults / f"slow-{rank}").exists():
            asleep.wait(0.005)
        if (fault := faults / f"load-{rank}").exists():
            raise OSError(fault.read_text())
        return prepare(request, **how)

    def fill_or_fail(*args: Any) -> None:
        if (fault := faults / f"fill-{rank}").exists():
            raise OSError(fault.read_text())
        fill(*args)

    manager._prepare, models._fill = prepare_or_fail, fill_or_fail
    distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    runner = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=manager))
    with suppress(EOFError):
        while True:
            call, ask = calls.recv()
            if call != "step":
                calls.send(rpc.answer(runner, call, ask))
                continue
            manager.set_active_adapters({LoRARequest(*ask)}, None)
            adapter = models.get_adapter(ask[1])
            found = torch.zeros(1, dtype=torch.float64)
            if ask[1] in models._active_adapters:
                found += adapter.slab.data.double().abs().sum()
            distributed.all_reduce(found)
            calls.send(float(found))


class FourRanks(Site):
    """The engine's side of the calls, and an API server."""

    def __init__(self, ranks: list[Connection]) -> None:
        self.ranks, self.now, self.calls, self.turn = ranks, 100.0, list[str](), asyncio.Lock()
        self.api = [self.server("api-0")]

    async def all(self, call: str, ask: Any) -> list[Any]:
        """One call or step, in every rank."""
        async with self.turn:
            for rank in self.ranks:
                rank.send((call, ask))
            return [await asyncio.to_thread(rank.recv) for rank in self.ranks]

    async def rpc(self, method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        self.calls.append(args[0])
        return await self.all(*args)

    async def step(self, request: LoRARequest) -> float:
        """What the ranks' shares add up to, which is the same on each."""
        [total] = {*await self.all("step", (request.lora_name, request.lora_int_id, request.lora_path))}
        return float(total)

    async def told(self) -> list[tuple[Any, ...]]:
        """What each rank has, and the bytes that it counts."""
        answers = await self.all("sync", {"user": "test", "holds": [], "policies": {}, "sequence": 0})
        return [(sorted(answer["resident"]), answer["used_bytes"]) for answer in answers]


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    (tmp_path / "faults").mkdir()
    return tmp_path / "faults"


@pytest.fixture
def files(tmp_path: Path) -> list[Files]:
    return [Files(tmp_path / f"a{number}") for number in range(ADAPTERS)]


@pytest.fixture
def managers(make: Make, files: list[Files]) -> list[TieredWorkerManager]:
    """Of each rank, with its share of the model, and room for three of four adapters."""
    found = [worker(make, ROOM * files[0].size_bytes, rank=rank, size=RANKS) for rank in range(RANKS)]
    for manager in found:
        manager._alone = False
    return found


@pytest.fixture
def ranks(managers: list[TieredWorkerManager], faults: Path, tmp_path: Path) -> Iterator[list[Connection]]:
    """Their processes, forked from this one, which has imported vLLM."""
    fork, pipes, processes = multiprocessing.get_context("fork"), [], []
    for rank, manager in enumerate(managers):
        here, there = fork.Pipe()
        args = rank, manager, there, tmp_path / "meeting", faults
        processes.append(fork.Process(target=serve, args=args, daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    yield pipes
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture
async def engine(ranks: list[Connection]) -> FourRanks:
    return FourRanks(ranks)


async def load(api: InProcess, files: list[Files], number: int) -> LoRARequest:
    await api.load(f"a{number}", files[number].path, record(number + 1))
    return api.requests[f"a{number}"]


async def test_a_slow_rank_holds_up_its_adapter_alone(
    engine: FourRanks, files: list[Files], faults: Path
) -> None:
    """Steps go on meanwhile; no rank takes the adapter in before the others."""
    [api] = engine.api
    first = await load(api, files, 0)
    total = await engine.step(first)
    assert total > 0
    (faults / "slow-2").touch()
    loading = asyncio.create_task(load(api, files, 1))
    for _ in range(STEPS):
        assert await engine.step(first) == total
    assert not loading.done()
    assert {tuple(names) for names, _ in await engine.told()} == {("1",)}
    (faults / "slow-2").unlink()
    await asyncio.wait_for(loading, FOR_EVER)
    told = await engine.told()
    assert told[0][0] == ["1", "2"]
    assert told == told[:1] * RANKS


async def test_a_rank_that_cannot_load(engine: FourRanks, files: list[Files], faults: Path) -> None:
    """The reason is its own; no rank has the adapter, and the next try finds room on all."""
    [api] = engine.api
    (faults / "load-3").write_text("the fourth rank has no memory")
    with pytest.raises(EngineRejected, match="the fourth rank has no memory"):
        await load(api, files, 0)
    assert [names for names, _ in await engine.told()] == [[]] * RANKS
    (faults / "load-3").unlink()
    assert await engine.step(await load(api, files, 0)) > 0


async def test_a_rank_that_fails_at_fill(engine: FourRanks, files: list[Files], faults: Path) -> None:
    """What the others add up to is no adapter's: its answers end with the reason, and all begin anew."""
    [api] = engine.api
    request = await load(api, files, 0)
    (faults / "fill-1").write_text("the second rank has no memory")

    async def answer() -> None:
        async with api.answering(request):
            await asyncio.wait_for(asyncio.Event().wait(), FOR_EVER)

    answering = asyncio.create_task(answer())
    await engine.step(request)
    with pytest.raises(EngineUnavailable, match="the second rank has no memory"):
        await answering
    (faults / "fill-1").unlink()
    with api.using(request):
        assert not await api.hold(request)
    assert [names for names, _ in await engine.told()] == [[]] * RANKS
    assert await engine.step(await load(api, files, 0)) > 0


async def test_a_request_that_passed_no_gate(engine: FourRanks, files: list[Files], faults: Path) -> None:
    """Its step cannot read the adapter, and one rank tries for longer; all read it in one later step."""
    [api], request = engine.api, LoRARequest("late", 9, files[0].path)
    whole = await engine.step(await load(api, files, 0))
    for rank in range(RANKS):
        (faults / f"load-{rank}").write_text("no volume")
    (faults / "slow-2").touch()
    failing = asyncio.create_task(engine.step(request))
    await asyncio.sleep(0.2)  # so long it takes
    (faults / "slow-2").unlink()
    assert await failing == 0
    for fault in faults.iterdir():
        fault.unlink()
    totals = [await engine.step(request) for _ in range(RETRY_STEPS)]
    assert totals == [*(RETRY_STEPS - 1) * [0.0], whole]


async def test_they_evict_the_same(engine: FourRanks, files: list[Files], faults: Path) -> None:
    """Where each rank is the slow one in its turn, and one adapter has no room beside the others."""
    [api] = engine.api
    for number in range(ADAPTERS):
        (faults / f"slow-{number}").touch()
        loading = asyncio.create_task(load(api, files, number))
        if number:
            with api.using(api.requests["a0"]):  # so a1 is out of use for longest
                assert await api.hold(api.requests["a0"])
        (faults / f"slow-{number}").unlink()
        await asyncio.wait_for(loading, FOR_EVER)
        engine.now += 2 * LINGER_S
        await api.loaded()
    told = await engine.told()
    assert told == told[:1] * RANKS
    assert told[0][0] == ["1", "3", "4"]
