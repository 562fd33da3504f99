"""What an engine is asked for to know what it is busy with: parts of its metrics, the growing one rarely."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from lora_fs.sidecar.engine.activity import ADAPTERS, BYTES_S, PART_BYTES, Looks
from lora_fs.sidecar.engine.protocol import Activity, Queue
from lora_fs.sidecar.errors import EngineUnavailable

pytestmark = pytest.mark.anyio

LABELS = ["max_lora", "waiting_lora_adapters", "running_lora_adapters"]


class Engine:
    """vLLM's metrics, kept and written as it does. ``has_parts``: else it always writes all."""

    def __init__(self, *, has_parts: bool = True) -> None:
        self.has_parts, self.now = has_parts, 100.0
        self.asked: list[tuple[str, ...]] = []
        self.written: list[int] = []  # bytes
        self.registry = CollectorRegistry()
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        self._counts = [Gauge(name, "", registry=self.registry) for name in names]
        self._adapters = Gauge(ADAPTERS, "", LABELS, registry=self.registry)
        for number in range(20):
            Histogram(f"vllm:h{number}", "", registry=self.registry)
        self.looks = Looks(self.ask, clock=lambda: self.now)

    async def ask(self, *names: str) -> str:
        await asyncio.sleep(0)
        parts = names and self.has_parts
        text = generate_latest(self.registry.restricted_registry(names) if parts else self.registry).decode()
        self.asked.append(names)
        self.written.append(len(text))
        return text

    def runs(self, *adapters: str, waiting: int = 0) -> None:
        """Have requests for these adapters, a moment later."""
        self.now += 0.001
        for gauge, count in zip(self._counts, (len(adapters), waiting), strict=True):
            gauge.set(count)
        self._adapters.labels("2", "", ",".join(adapters)).set(self.now)


@pytest.fixture
def engine() -> Engine:
    return Engine()


async def test_the_rest_of_the_metrics_is_not_asked_for(engine: Engine) -> None:
    engine.runs("sql")
    assert await engine.looks.activity() == Activity(frozenset({"sql"}), 2, Queue(1, 0))
    assert len(engine.written) == 1
    assert engine.written[0] < len(generate_latest(engine.registry)) / 4


@pytest.mark.parametrize("has_parts", [True, False])
async def test_an_engine_of_many_series_writes_a_bounded_share(has_parts: bool) -> None:
    """Whoever looks, and however often: here a hundred times a second."""
    engine = Engine(has_parts=has_parts)
    for number in range(2000):
        engine.runs(f"a{number}")
    began = engine.now
    for _ in range(1000):
        await engine.looks.activity()
        engine.now += 0.01
    seconds = engine.now - began
    big = [size for size in engine.written if size > 1000]
    assert 1 < len(big) < 20, "the adapters in use are looked at again"
    assert sum(big[:-2]) <= BYTES_S * seconds  # one look finds out that it writes all, and one is the last
    assert max([size for size in engine.written if size <= 1000], default=0) < 400


async def test_a_large_part_is_not_asked_for_by_name(engine: Engine) -> None:
    """vLLM would write it on its event loop, and writes all its metrics in a thread."""
    for number in range(2000):
        engine.runs(f"a{number}")
    for _ in range(3):
        await engine.looks.activity()
        engine.now += 10
    assert engine.written[0] > PART_BYTES
    assert engine.asked[1:] == [(), ()]


async def test_who_is_in_use_is_known_again_after_a_while(engine: Engine) -> None:
    """Until then it is as of the last look; the counts are of now."""
    for number in range(2000):
        engine.runs(f"a{number}")
    assert (await engine.looks.activity()).busy == {"a1999"}
    engine.now += 0.01
    engine.runs("b", "c", waiting=1)
    assert await engine.looks.activity() == Activity(frozenset({"a1999"}), 2, Queue(2, 1), is_new=False)
    engine.now += 10
    assert await engine.looks.activity() == Activity(frozenset({"b", "c"}), 2, Queue(2, 1))


async def test_without_requests_no_adapter_is_in_use(engine: Engine) -> None:
    """The two counts say so: the series need not be read."""
    for number in range(2000):
        engine.runs(f"a{number}")
    await engine.looks.activity()
    engine.runs()
    assert await engine.looks.activity() == Activity(frozenset(), 2, Queue(0, 0), is_new=False)
    assert engine.written[-1] < 400


async def test_two_looks_at_once_ask_for_the_adapters_once(engine: Engine) -> None:
    """A pass looks, and a request that waits for a place."""
    for number in range(2000):
        engine.runs(f"a{number}")
    first, second = await asyncio.gather(engine.looks.activity(), engine.looks.activity())
    assert first.busy == second.busy == {"a1999"}
    assert [ADAPTERS in names for names in engine.asked] == [True, False]


async def test_after_a_look_that_fails_all_is_new(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another engine: what the last one had in use, and how many slots, says nothing of it."""

    async def silent(*_: str) -> str:
        raise EngineUnavailable("no answer")

    for number in range(2000):
        engine.runs(f"a{number}")
    await engine.looks.activity()
    with monkeypatch.context() as patched:
        patched.setattr(engine.looks, "_ask", silent)
        with pytest.raises(EngineUnavailable):
            await engine.looks.activity()
    engine.runs("sql")
    assert await engine.looks.activity() == Activity(frozenset({"sql"}), 2, Queue(1, 0))


async def test_an_engine_without_counts_is_asked_for_all() -> None:
    """It has the one metric, as an older vLLM might, or none."""
    asked: list[tuple[str, ...]] = []
    series = f'{ADAPTERS}{{max_lora="3",running_lora_adapters="sql",waiting_lora_adapters=""}} 1.0\n'

    async def ask(*names: str) -> str:
        asked.append(names)
        return "" if names else series

    assert await Looks(ask).activity() == Activity(frozenset({"sql"}), 3)
    assert [bool(names) for names in asked] == [True, False]
