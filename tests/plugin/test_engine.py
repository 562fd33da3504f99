"""The engine as the reconciler sees it: ``InProcess`` over the worker's real calls and real tiers."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import ParallelConfig
from vllm.lora.request import LoRARequest

from lora_fs.sidecar.errors import EngineRejected, EngineUnavailable, InvalidName
from lora_fs.sidecar.model import Policy, PolicyKind, Record, check_segment, engine_name, public_of
from lora_fs.worker_patch import processors
from lora_fs.worker_patch.api import engine as in_process
from lora_fs.worker_patch.api.asked import Requests
from lora_fs.worker_patch.api.engine import LINGER_S, LOOK_MOST_S, InProcess
from lora_fs.worker_patch.worker import rpc
from lora_fs.worker_patch.worker.managers import STOCK
from lora_fs.worker_patch.worker.slots.steps import Blank
from lora_fs.worker_patch.worker.slots.tiers import NoRoom
from tests.plugin.without_tensors import Worker
from tests.reconcile.test_plan import RECORD

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Site:
    """One worker, and the API servers that call it."""

    def __init__(self) -> None:
        self.worker, self.now, self.down = Worker(), 100.0, False
        self.calls: list[str] = []
        self.waits: list[float] = []
        self.asked = asyncio.Event()  # a second load was asked for
        self.api = [self.server(f"api-{n}") for n in range(2)]

    def server(self, user: str, *, servers: int = 2, others: str = "") -> InProcess:
        """``others``: how vLLM is told that other front ends have engines of their own."""
        parallel = (
            ParallelConfig(data_parallel_size=2, data_parallel_size_local=1) if others else ParallelConfig()
        )
        parallel._api_process_count = servers
        if others:
            setattr(parallel, f"data_parallel_{others}_lb", True)
        config = SimpleNamespace(parallel_config=parallel)
        client: Any = SimpleNamespace(collective_rpc=self.rpc, vllm_config=config)
        bases = [SimpleNamespace(model_dump=lambda: {"id": "tiny", "parent": None})]

        async def show() -> Any:
            return SimpleNamespace(data=bases)

        registry = SimpleNamespace(show_available_models=show)
        models: Any = SimpleNamespace(registry=registry, lora_requests=Requests({}))
        return InProcess(client, models, user, timeout_s=5, clock=lambda: self.now)

    async def rpc(self, method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        if self.down:
            raise RuntimeError("EngineCore encountered an issue")
        self.calls.append(args[0])
        if args[0] == "load":
            self.waits.append(args[1]["wait_s"])
        if self.calls.count("load") > 1:
            self.asked.set()
        return [rpc.CALLS[args[0]](self.worker, args[1])]


def record(number: int, policy: Policy | None = None) -> Record:
    spec = RECORD.spec.model_copy(update={"int_id": number, "policy": policy})
    return RECORD.model_copy(update={"spec": spec})


@pytest.fixture
def site() -> Site:
    return Site()


async def test_a_load_is_ready_when_it_returns(site: Site) -> None:
    api = site.api[0]
    await api.load("sql", "/stage/d/sql", record(7))
    assert site.worker.brought == [7], "it is copied to the device before a step needs it"
    assert api.requests["sql"].lora_int_id == 7
    loaded = await api.loaded()
    assert loaded.adapters == {"sql": "/stage/d/sql"}
    assert loaded.tiers == {"sql": "host"}
    assert [card["id"] for card in loaded.base_cards] == ["tiny"]
    assert (await api.activity()).max_loras == 2
    site.worker.set_active_adapters({api.requests["sql"]}, None)
    assert (await api.loaded()).tiers == {"sql": "gpu"}


async def test_an_engine_that_serves_nobody_waits_for_a_load(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call is enough then, for a failure too."""
    monkeypatch.setattr(in_process, "ALONE_S", 20.0)
    api = site.server("only", servers=1)
    await api.load("sql", "/p", record(7))
    site.worker.broken[8] = "the model has no layer x"
    with pytest.raises(EngineRejected, match="no layer x"):
        await api.load("broken", "/p", record(8))
    assert site.waits == [20.0, 20.0]


async def test_a_request_that_takes_long_keeps_its_hold(site: Site) -> None:
    """However long its request takes, the next one finds it held."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    request = api.requests["sql"]
    with api.using(request):
        site.now += 2 * LINGER_S
        await api.loaded()
        site.calls.clear()
        assert await api.hold(request)
    assert site.calls == []


async def test_a_load_that_another_one_drives_out_is_begun_anew(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not fail: it ended, and was gone before it could be held. No notice says so."""
    monkeypatch.setattr(in_process, "UNHEARD_S", 600.0)
    wait = site.worker.wait

    def driven_out(adapter: int, most_s: float, user: str) -> None:
        wait(adapter, 20.0, user)
        monkeypatch.setattr(site.worker, "wait", wait)
        site.worker.tiers.remove(adapter)

    monkeypatch.setattr(site.worker, "wait", driven_out)
    await site.server("only", servers=1).load("sql", "/p", record(7))
    assert site.worker.loads == [7, 7]


BUSY = ("with a request", "with another load", "with another API server", "by external", "by hybrid")


@pytest.mark.parametrize("busy", BUSY)
async def test_an_engine_that_may_serve_somebody_does_not(site: Site, busy: str) -> None:
    """Nor one that steps together with engines of which this front end knows nothing."""
    elsewhere = busy.partition("by ")[2]
    api = site.server("one", servers=2 if busy == "with another API server" else 1, others=elsewhere)
    with api.serving() if busy == "with a request" else ExitStack():
        others = [record(8)] if busy == "with another load" else []
        await asyncio.gather(*(api.load(f"a{one.spec.int_id}", "/p", one) for one in (record(7), *others)))
    assert site.waits[len(others)] == 0
    assert busy == "with another load" or not any(site.waits)


async def test_who_works_beside_steps_keeps_off_their_processors(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every worker's, once they have said; until then it runs anywhere."""
    usual = os.sched_getaffinity(0)
    bound = [frozenset[int](), frozenset({min(usual)})]
    api = site.api[0]

    def seen() -> set[int]:
        api.step_aside()
        return os.sched_getaffinity(0)

    assert await asyncio.to_thread(seen) == usual
    answer, binding = site.rpc, iter(bound)

    async def of_two(method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [*await answer(method, args), *await answer(method, args)]

    monkeypatch.setattr(api._client, "collective_rpc", of_two)
    monkeypatch.setattr(processors, "of_steps", lambda: next(binding))
    await api.loaded()
    assert await asyncio.to_thread(seen) == (usual - bound[1] or usual)


@pytest.mark.parametrize(("count", "named"), [(64, True), (65, False)])
async def test_a_load_says_how_to_make_room_for_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, count: int, named: bool
) -> None:
    """By its priority, and by its modules unless they are too many to send and to match."""
    asked: list[dict[str, Any]] = []
    begin, wanted = site.worker.begin_load, record(7, Policy(priority=3))

    def begun(request: LoRARequest, ask: dict[str, Any]) -> None:
        asked.append(ask)
        begin(request, ask)

    monkeypatch.setattr(site.worker, "begin_load", begun)
    targets = tuple(f"m{number}" for number in range(count))
    lora = wanted.spec.lora.model_copy(update={"target_modules": targets})
    spec = wanted.spec.model_copy(update={"lora": lora})
    await site.api[0].load("sql", "/p", wanted.model_copy(update={"spec": spec}))
    assert asked[0]["priority"] == 3
    assert asked[0]["target_modules"] == ([*targets] if named else [])


async def test_a_later_load_leaves_the_others_their_names(site: Site) -> None:
    for number in (7, 8):
        await site.api[0].load(f"a{number}", "/p", record(number))
    await site.api[0].loaded()
    assert [one["name"] for _, one in site.api[0]._resident()] == ["a7", "a8"]


async def test_two_servers_share_a_load(site: Site) -> None:
    site.worker.go.clear()
    calls = [api.load("sql", "/stage/d/sql", record(7)) for api in site.api for _ in range(16)]
    loads = asyncio.gather(*calls)
    await site.asked.wait()
    site.worker.go.set()
    await loads
    assert site.worker.loads == [7]


async def test_a_failure_is_told_and_tried_again_when_asked_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the worker, as it happens. The staged copy's path is not told: clients read it."""
    monkeypatch.setattr(in_process, "UNHEARD_S", 600.0)
    site.worker.broken[7] = "the model has no layer x, and /stage/d1/sql has"
    with pytest.raises(EngineRejected, match="no layer x, and its staged copy has"):
        await site.api[0].load("sql", "/stage/d1/sql", record(7))
    assert site.api[0].requests == {}
    assert site.worker.tiers.used_bytes == 0
    del site.worker.broken[7]
    await site.api[0].load("sql", "/p", record(7))


async def test_an_adapter_in_use_makes_no_room(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third is refused in bounded time while both others have requests, and comes once they ended."""
    monkeypatch.setattr(in_process, "FULL_WAIT_S", -1.0)
    monkeypatch.setattr(in_process, "FULL_S", 0.0)
    api = site.api[0]
    with ExitStack() as requests:
        for number in (1, 2):
            await api.load(f"a{number}", f"/p{number}", record(number))
            requests.enter_context(api.using(api.requests[f"a{number}"]))
            assert await api.hold(api.requests[f"a{number}"])
        with pytest.raises(EngineUnavailable, match="no room in host memory for a3"):
            await api.load("a3", "/p3", record(3))
    monkeypatch.undo()
    await api.load("a3", "/p3", record(3))
    assert (await api.loaded()).adapters.keys() == {"a2", "a3"}


async def test_a_busy_adapter_costs_no_calls(site: Site) -> None:
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    request = api.requests["sql"]
    for _ in range(10):
        with api.using(request):
            assert await api.hold(request)
    assert site.calls.count("hold") == 0  # the load held it
    with api.using(request):
        site.now += 10 * LINGER_S
        await api.loaded()
        assert site.worker.tiers.entries[7].holders.keys() == {"api-0"}
    site.now += LINGER_S + 1
    await api.loaded()
    assert not site.worker.tiers.entries[7].holders
    for _ in range(10):
        with api.using(request):
            assert await api.hold(request)
    assert site.calls.count("hold") == 1


async def test_a_hold_under_way_is_not_taken_back(site: Site) -> None:
    """A pass that comes between the call and its answer knows of the request."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    with api.using(api.requests["sql"]):
        held, _ = await asyncio.gather(api.hold(api.requests["sql"]), api.loaded())
        assert held
        assert site.worker.tiers.entries[7].holders


async def test_a_load_whose_end_is_not_known_here_is_held(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that comes while the worker's last answer is under way takes nothing back."""
    api, answer = site.api[0], site.rpc
    passed = asyncio.Event()

    async def late(method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        answers = await answer(method, args)
        if args[0] == "load" and answers[0]["state"] == "ready":
            monkeypatch.undo()
            await api.loaded()
            passed.set()
        return answers

    monkeypatch.setattr(api._client, "collective_rpc", late)
    await api.load("sql", "/p", record(7))
    assert passed.is_set()
    assert site.worker.tiers.entries[7].holders.keys() == {"api-0"}
    with api.using(api.requests["sql"]):
        assert await api.hold(api.requests["sql"])
        await api.load("a8", "/p", record(8))
        await api.load("a9", "/p", record(9))
        assert 7 in site.worker.tiers.entries


async def test_what_ran_blank_is_asked_for_anew(site: Site) -> None:
    """Though it was used a moment ago: until it is loaded again no request is let pass."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    request = api.requests["sql"]
    site.worker._run_blank(7, MemoryError(), 0.0)
    assert (await api.loaded()).adapters == {}
    with api.using(request):
        await api.hold(request)
    assert site.calls.count("hold") == 1


@pytest.mark.parametrize("call", ["hold", "load"])
async def test_a_blank_run_that_overtakes_an_answer(
    site: Site, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It was of another API server's request: this server asks again before it lets one of its own pass."""
    monkeypatch.setattr(in_process, "ALONE_S", 20.0)  # one call a load
    api, answer = site.server("only", servers=1), site.rpc

    async def run_blank() -> None:
        async with api.answering(LoRARequest("sql", 7, "/p")):
            site.worker.notices.blank(7, "no memory")
            await asyncio.Event().wait()

    async def overtaken(method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        answers = await answer(method, args)
        if args[0] == call:
            patch.undo()
            site.worker.blank[7] = Blank(0, 1e9)
            with pytest.raises(EngineUnavailable, match="no memory"):
                await run_blank()
        return answers

    if call == "hold":
        await api.load("sql", "/p", record(7))
        site.now += LINGER_S
        await api.loaded()
    with monkeypatch.context() as patch:
        patch.setattr(api._client, "collective_rpc", overtaken)
        if call == "load":
            await api.load("sql", "/p", record(7))
        with api.using(api.requests["sql"]):
            assert not await api.hold(api.requests["sql"])
            await api.load("sql", "/p", record(7))
            assert await api.hold(api.requests["sql"])
    assert site.worker.blank == {}


@pytest.mark.parametrize("again", [False, True], ids=["for good", "and wanted again"])
async def test_a_load_that_was_given_up(site: Site, monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    """What it brings late stays for nobody, or for who asks meanwhile."""
    api = site.api[0]
    site.worker.go.clear()
    monkeypatch.setattr(api, "_timeout_s", 0.01)
    site.now = 0
    monkeypatch.setattr(api, "_clock", itertools.count().__next__)
    with pytest.raises(EngineUnavailable, match="has not loaded sql"):
        await api.load("sql", "/p", record(7))
    loading = asyncio.create_task(site.api[1].load("sql", "/p", record(7))) if again else None
    site.asked.clear()
    if loading is not None:
        await site.asked.wait()
    site.worker.go.set()
    if loading is not None:
        await loading
    site.worker.wait(7, 20, "api")
    assert (7 in site.worker.tiers.entries) == again
    assert site.worker.tiers.free_bytes == (10 if again else 20)
    assert site.worker.loads == [7]


@pytest.fixture
def second(site: Site, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """Another engine behind the first API server; vLLM's own call gives one's answers."""
    second = Worker()

    engines = [rank.to_bytes(2, "little") for rank in (2, 3)]

    async def of_one(
        name: str, method: str, timeout: None, args: Any, kwargs: None, *, engine: bytes
    ) -> list[Any]:
        assert name == "collective_rpc"
        if engine == engines[0]:
            return await site.rpc(method, args)
        return [rpc.CALLS[args[0]](second, args[1])]

    core = SimpleNamespace(core_engines=engines, _call_utility_async=of_one)
    monkeypatch.setattr(site.api[0]._client, "engine_core", core, raising=False)
    return second


async def test_every_engine_is_asked(site: Site, second: Worker) -> None:
    """What another lacks is not there."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    assert second.loads == [7]
    second.tiers.remove(7)
    request = api.requests["sql"]
    assert (await api.loaded()).adapters == {}
    with api.using(request):
        assert not await api.hold(request)


async def test_every_engine_is_heard(site: Site, second: Worker) -> None:
    """By vLLM's number of it; an adapter is in a slot where it is in any engine's."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    second.counters["blank_runs"] = 1
    second.tiers.place(7)
    assert (await api.loaded()).tiers == {"sql": "gpu"}
    heard = [(worker["engine"], worker["counters"].get("blank_runs", 0)) for worker in api.seen]
    assert heard == [("2", 0), ("3", 1)]


@pytest.mark.parametrize("meanwhile", ["has it", "is loading it"])
async def test_a_load_that_fails_in_one_engine_leaves_nothing_in_the_others(
    site: Site, second: Worker, meanwhile: str
) -> None:
    """No bytes and no pin, which nobody could ever take back; and it can be had once the cause is gone."""
    api, first, pinned = site.api[0], site.worker, Policy(kind=PolicyKind.PINNED)
    second.broken[7] = "no memory"
    if meanwhile == "has it":
        await site.api[1].load("sql", "/p", record(7, pinned))
    else:
        first.go.clear()
    with pytest.raises(EngineRejected, match="no memory"):
        await api.load("sql", "/p", record(7, pinned))
    first.go.set()
    first.wait(7, 20, "api")
    await site.api[1].unload("sql")
    assert first.tiers.entries == {}
    assert first.tiers.free_bytes == 20
    del second.broken[7]
    await api.load("sql", "/p", record(7, pinned))
    assert (await api.loaded()).adapters == {"sql": "/p"}
    assert [manager.tiers.entries[7].pinned for manager in (first, second)] == [True, True]


@pytest.fixture
def ranks(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Two ranks of one engine, whose answers come with one call."""
    ranks = [Worker(alone=False), Worker(alone=False)]

    async def of_two(method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        site.calls.append(args[0])
        await asyncio.sleep(0)
        return [rpc.CALLS[args[0]](worker, args[1]) for worker in ranks]

    monkeypatch.setattr(site.api[0]._client, "collective_rpc", of_two)
    return ranks


async def test_ranks_take_an_adapter_in_together(site: Site, ranks: list[Worker]) -> None:
    """In two calls, each as large as the largest share: so both evict the same."""
    api = site.api[0]
    for number in (1, 2):
        await api.load(f"a{number}", f"/p{number}", record(number))
    assert site.calls == ["load"] * 4
    site.now += 10 * LINGER_S
    await api.loaded()
    ranks[1].sizes[3] = 15
    await api.load("a3", "/p3", record(3))
    assert [worker.tiers.entries.keys() for worker in ranks] == [{3}, {3}]
    assert [worker.tiers.used_bytes for worker in ranks] == [15, 15]


async def test_where_one_rank_fails_none_keeps_its_room(site: Site, ranks: list[Worker]) -> None:
    """Nobody is evicted for it; the reason is that rank's, and a later load is begun anew on each."""
    api = site.api[0]
    for number in (1, 2):
        await api.load(f"a{number}", f"/p{number}", record(number))
    site.now += 10 * LINGER_S
    await api.loaded()
    ranks[1].broken[3] = "no memory"
    with pytest.raises(EngineRejected, match="no memory"):
        await api.load("a3", "/p3", record(3))
    assert (await api.loaded()).adapters.keys() == {"a1", "a2"}
    assert [(worker.tiers.free_bytes, [*worker.under_way]) for worker in ranks] == [(0, []), (0, [])]
    del ranks[1].broken[3]
    await api.load("a3", "/p3", record(3))
    assert [worker.tiers.entries.keys() for worker in ranks] == [{2, 3}, {2, 3}]


async def test_what_one_rank_lost_none_keeps(site: Site, ranks: list[Worker]) -> None:
    """As after a step that failed there: all begin anew, and go on to agree."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    ranks[1].tiers.remove(7)
    site.now += 10 * LINGER_S
    api._held.clear()
    with api.using(api.requests["sql"]):
        assert not await api.hold(api.requests["sql"])
    assert [7 in worker.tiers.entries for worker in ranks] == [False, False]


@pytest.mark.parametrize("name", ["sql", "a name that has it"])
async def test_what_one_engine_lost_stays_in_no_other(site: Site, second: Worker, name: str) -> None:
    """From the next look on; but not while a request may be running from it."""
    api = site.api[0]
    await api.load("sql", "/p", record(7, Policy(kind=PolicyKind.PINNED)))
    if name != "sql":
        await api.load(name, "/p", record(7))
    second.tiers.remove(7)
    with api.using(api.requests["sql"]):
        await api.loaded()
        assert 7 in site.worker.tiers.entries
    await api.loaded()
    assert site.worker.tiers.entries == {}


async def test_what_a_call_that_was_lost_brought_is_given_up(site: Site) -> None:
    """The engine did not answer in time, and has it all the same: until the next look."""
    api = site.api[0]
    site.worker.go.clear()
    loads = asyncio.create_task(api.load("sql", "/p", record(7)))
    await site.asked.wait()
    site.down = True
    with pytest.raises(EngineUnavailable):
        await loads
    site.down = False
    site.worker.go.set()
    site.worker.wait(7, 20, "api")
    assert 7 in site.worker.tiers.entries
    await site.api[1].load("other", "/p", record(8))
    await api.loaded()
    assert site.worker.tiers.entries.keys() == {8}  # another server's is not this one's business


@pytest.mark.parametrize("there", [True, False])
async def test_a_blank_adapter_that_nobody_wants_goes(site: Site, there: bool) -> None:
    """It was unregistered before anything loaded it anew: its bytes and its pin are free."""
    api, worker = site.api[0], site.worker
    await api.load("sql", "/p", record(7, Policy(kind=PolicyKind.PINNED)))
    with api.using(api.requests["sql"]):
        worker._run_blank(7, MemoryError("no memory"), 0.0)
        if not there:
            worker.tiers.remove(7)
        await api.loaded()
        assert worker.blank.keys() == {7}, "a request may be running"
    await api.unload("sql")
    await api.loaded()
    assert (worker.tiers.entries, worker.blank, worker.failures) == ({}, {}, {})
    calls = len(site.calls)
    await api.loaded()
    assert site.calls[calls:] == ["sync"]


async def test_a_blank_adapter_that_another_server_wants_stays(site: Site) -> None:
    """Until that server loads it anew."""
    for api in site.api:
        await api.load("sql", "/p", record(7))
    site.worker._run_blank(7, MemoryError("no memory"), 0.0)
    await site.api[0].unload("sql")
    assert site.worker.tiers.entries[7].users == {"api-1"}
    assert 7 in site.worker.blank


async def test_a_blank_adapter_of_vllms_own_stays(site: Site) -> None:
    """A later step tries again: no look gives it up."""
    worker, request = site.worker, LoRARequest("own", 5, "/own")
    worker.tiers.admit(5, 3)
    worker.tiers.hold(5, STOCK, 0)
    worker._run_blank(5, MemoryError("no memory"), 0.0)
    site.api[0]._models.lora_requests["own"] = request
    await site.api[0].loaded()
    assert ([*worker.blank], site.calls) == ([5], ["sync"])


async def test_a_load_under_way_is_no_stray(site: Site, second: Worker) -> None:
    """It has ended in one engine, and not yet in the other, while a pass looks."""
    api = site.api[0]
    second.go.clear()
    load = asyncio.create_task(api.load("sql", "/p", record(7)))
    await site.asked.wait()
    site.worker.wait(7, 20, "api")
    assert (await api.loaded()).adapters == {}
    second.go.set()
    await load
    assert (site.worker.loads, second.loads) == ([7], [7])
    assert "drop" not in site.calls


async def test_a_look_for_strays_grows_with_the_adapters_alone(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with their square: no adapter is looked for among all that are wanted."""
    api = site.api[0]
    for number in (1, 2):
        await api.load(f"a{number}", f"/p{number}", record(number))
    wanted = Mock(wraps=api._wanted)
    monkeypatch.setattr(api, "_wanted", wanted)
    assert (await api.loaded()).adapters.keys() == {"a1", "a2"}
    wanted.assert_not_called()
    assert "drop" not in site.calls


@pytest.mark.parametrize("servers", [1, 2])
async def test_what_a_step_read_again_for_nobody_goes(site: Site, servers: int) -> None:
    """Its name went under a request that still runs. Another server may have one, if there is another."""
    api = site.server("only", servers=servers)
    await api.load("sql", "/p", record(7))
    request = api.requests["sql"]
    with api.using(request):
        await api.unload("sql")
        site.worker.set_active_adapters({request}, None)
        await api.loaded()
        assert 7 in site.worker.tiers.entries
    await api.loaded()
    assert (7 in site.worker.tiers.entries) == (servers > 1)


async def test_what_vllm_loaded_itself_is_no_stray(site: Site) -> None:
    """Whatever this server is called, an adapter of ``--lora-modules`` is not its own to give up."""
    with pytest.raises(InvalidName):
        check_segment("replica id", STOCK)
    tiers = site.worker.tiers
    tiers.admit(5, 3)
    tiers.hold(5, STOCK, 0)
    await site.server("vllm").loaded()
    assert tiers.entries[5].users == {STOCK}
    assert "drop" not in site.calls


async def test_pinned_while_it_is_loaded(site: Site) -> None:
    """From the next look on it makes no room, until it is unpinned; one of two slots is kept free."""
    api = site.api[0]
    for number in (1, 2):
        await api.load(f"a{number}", f"/p{number}", record(number))
    pinned, lazy = Policy(kind=PolicyKind.PINNED, priority=1), Policy()
    api.prefer({"a1": pinned, "a2": pinned.model_copy(update={"priority": 2}), "gone": pinned})
    await api.loaded()
    assert {n for n, entry in site.worker.tiers.entries.items() if entry.pinned} == {2}
    site.now += 10 * LINGER_S
    await api.loaded()
    await api.load("a3", "/p3", record(3))
    assert (await api.loaded()).adapters.keys() == {"a2", "a3"}
    api.prefer({"a2": lazy, "a3": lazy})
    site.now += 10 * LINGER_S
    await api.loaded()
    await api.load("a4", "/p4", record(4))
    assert "a2" not in (await api.loaded()).adapters


async def test_an_evicted_adapter_is_missed(site: Site) -> None:
    api = site.api[0]
    for number in (1, 2, 3):
        await api.load(f"a{number}", f"/p{number}", record(number))
    with api.using(api.requests["a1"]):
        assert not await api.hold(api.requests["a1"])
    assert (await api.loaded()).adapters.keys() == {"a2", "a3"}
    assert api.requests.keys() == {"a2", "a3"}


async def test_an_adapter_goes_when_no_server_wants_it(site: Site) -> None:
    for api in site.api:
        await api.load("sql", "/p", record(7))
    await site.api[0].unload("sql")
    assert 7 in site.worker.tiers.entries
    assert (await site.api[0].loaded()).adapters == {}
    assert (await site.api[1].loaded()).adapters == {"sql": "/p"}
    await site.api[1].unload("sql")
    assert 7 not in site.worker.tiers.entries
    await site.api[1].unload("sql")  # again is fine


async def test_one_id_under_two_names_goes_with_the_last(site: Site) -> None:
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    await api.load("sql@v1", "/p", record(7))
    await api.unload("sql")
    assert 7 in site.worker.tiers.entries
    await api.unload("sql@v1")
    assert 7 not in site.worker.tiers.entries


async def test_pins_stop_before_the_last_slot(site: Site) -> None:
    pinned = Policy(kind=PolicyKind.PINNED)
    for number in (1, 2):
        await site.api[0].load(f"a{number}", f"/p{number}", record(number, pinned))
    assert [site.worker.tiers.entries[n].pinned for n in (1, 2)] == [True, False]
    with pytest.raises(NoRoom):
        site.worker.tiers.pin(2)


async def test_a_workers_error_is_an_answer(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised in one of several it would leave the others' answers to be read by the next call."""
    worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager="stock's"))

    async def of_two(method: str, args: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
        return [*await site.rpc(method, args), rpc.answer(worker, *args)]

    monkeypatch.setattr(site.api[0]._client, "collective_rpc", of_two)
    with pytest.raises(EngineUnavailable, match="manager is str, not lora-fs's"):
        await site.api[0].loaded()


async def test_an_engine_that_is_gone(site: Site) -> None:
    site.down = True
    for call in (site.api[0].loaded(), site.api[0].load("sql", "/p", record(7))):
        with pytest.raises(EngineUnavailable, match="EngineCore encountered"):
            await call


async def test_a_worker_says_when_a_load_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked twice for a load of any length: to begin it, and when it has ended."""
    monkeypatch.setattr(in_process, "UNHEARD_S", 60.0)
    site.worker.go.clear()
    api = site.api[0]
    load = asyncio.create_task(api.load("sql", "/p", record(7)))
    for _ in range(20):
        await asyncio.sleep(LOOK_MOST_S)
    assert site.calls == ["load"]
    site.worker.go.set()
    await load
    assert site.calls == ["load", "load"]


async def test_a_worker_that_cannot_say_so_is_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one on another machine, where the server's socket is not."""
    monkeypatch.setattr(site.worker.notices, "reach", lambda user, path: False)
    monkeypatch.setattr(in_process, "UNHEARD_S", 60.0)
    site.worker.go.clear()
    load = asyncio.create_task(site.api[0].load("sql", "/p", record(7)))
    await site.asked.wait()
    site.worker.go.set()
    await load


async def test_a_worker_without_the_weights_ends_the_answers(site: Site) -> None:
    """Of that adapter, with the reason, and of no other; the next request asks whether it is there."""
    api = site.api[0]
    for number in (7, 8):
        await api.load(f"a{number}", "/p", record(number))
    await api.loaded()
    lost, other = (api.requests[f"a{number}"] for number in (7, 8))
    begun, never = asyncio.Event(), asyncio.Event()

    async def answer(request: LoRARequest) -> None:
        async with api.answering(request):
            begun.set()
            await never.wait()

    goes_on = asyncio.create_task(answer(other))
    with api.using(lost):
        ends = asyncio.create_task(answer(lost))
        await begun.wait()
        site.worker.notices.blank(7, "no memory for a slot")
        with pytest.raises(EngineUnavailable, match="lost a7: no memory for a slot"):
            await ends
        assert not goes_on.done()
        holds = site.calls.count("hold")
        await api.hold(lost)
        assert site.calls.count("hold") == holds + 1
    never.set()
    await goes_on


async def test_a_blank_run_leaves_its_adapter_no_prefix_blocks(site: Site) -> None:
    """vLLM keeps what the base model computed under the name that the requests had: a client that repeats its
    prompt would get it. So the next load has another name, which no client sees.
    """
    api, name, names = site.api[0], engine_name("sql", "sha256:" + "1" * 64), list[str]()

    async def answer() -> None:
        async with api.answering(api.requests[name]):
            site.worker._run_blank(7, MemoryError("no memory"), 0.0)
            await asyncio.wait_for(asyncio.Event().wait(), 60)

    for _ in range(3):
        for _ in range(2):
            await api.load(name, "/p", record(7))
            names.append(api.requests[name].lora_name)
        with pytest.raises(EngineUnavailable, match=r"lost sql: .*no memory"):
            await answer()
    assert names == [name, name, names[2], names[2], names[4], names[4]]
    assert len({*names}) == 3
    assert {*map(public_of, names)} == {"sql"}


async def test_a_blank_run_that_another_server_mended(site: Site) -> None:
    """This one finds the adapter there, and asks by the new name: the servers share the blocks."""
    name, first, second = engine_name("sql", "sha256:" + "1" * 64), *site.api
    for api in site.api:
        await api.load(name, "/p", record(7))
        api._lost(7, "no memory")
    await first.load(name, "/p", record(7))
    assert await second.hold(second.requests[name])
    assert second.requests[name].lora_name == first.requests[name].lora_name != name


async def test_a_blank_run_without_a_notice(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look at the worker ends the answer, as where the worker is on another machine."""
    api, begun = site.api[0], asyncio.Event()
    await api.load("sql", "/p", record(7))
    monkeypatch.setattr(site.worker.notices, "reach", lambda user, path: False)
    site.worker.notices._listeners.clear()

    async def answer() -> None:
        async with api.answering(api.requests["sql"]):
            begun.set()
            await asyncio.wait_for(asyncio.Event().wait(), 60)

    ends = asyncio.create_task(answer())
    await begun.wait()
    site.worker._run_blank(7, MemoryError("no memory"), 0.0)
    assert (await api.loaded()).adapters == {}
    with pytest.raises(EngineUnavailable, match=r"lost sql: .*no memory"):
        await ends


async def test_a_temporary_folder_of_a_long_name(
    site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As batch systems make them: the socket is where vLLM has its own."""
    long = tmp_path / ("job-" + 100 * "x")
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", short)
        await site.api[0].load("sql", "/p", record(7))
        assert site.api[0]._listener.path.startswith(short)


async def test_adapters_that_one_step_lost_together(site: Site) -> None:
    """Each answer has its own reason; what a second worker says of the same adapter changes nothing."""
    api = site.api[0]
    for number in (7, 8):
        await api.load(f"a{number}", "/p", record(number))
    await api.loaded()
    told = asyncio.Event()

    async def answer(number: int) -> None:
        async with api.answering(api.requests[f"a{number}"]):
            try:
                await asyncio.Event().wait()
            finally:  # as vLLM's own clean-up does
                await told.wait()

    ends = [asyncio.create_task(answer(number)) for number in (7, 7, 8)]
    await asyncio.sleep(0)
    site.worker.notices.blank(7, "no memory")
    site.worker.notices.blank(8, "no folder")
    await asyncio.sleep(0.05)
    site.worker.notices.blank(7, "no memory there either")
    await asyncio.sleep(0.05)
    told.set()
    errors = await asyncio.gather(*ends, return_exceptions=True)
    lost = [f"a worker of the engine lost {why}" for why in 2 * ["a7: no memory"] + ["a8: no folder"]]
    assert [(type(error), str(error)) for error in errors] == [(EngineUnavailable, why) for why in lost]
    assert api._answering == {}


async def test_an_answer_that_times_out_by_itself_did_not_lose_its_adapter(site: Site) -> None:
    """An error of the application's is its own."""
    api = site.api[0]
    await api.load("sql", "/p", record(7))
    with pytest.raises(TimeoutError, match="the application's"):
        async with api.answering(api.requests["sql"]):
            raise TimeoutError("the application's")
