"""The effect probe, where a neighbour's adapter is in the base model's rows, as in vLLM 0.32 on a CPU."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lora_fs.sidecar.reconcile.residents.effect import LEAST, Effect, Scores
from lora_fs.sidecar.reconcile.residents.probe import MOST_TRIES, PROMPTS, EffectProbe
from lora_fs.sidecar.reconcile.telemetry.events import EventLog

pytestmark = pytest.mark.anyio

ADAPTER, BASE, OTHER = "law@abc", (-0.5, -1.5), (-0.25, -2.5)
DIGEST = "sha256:" + 64 * "0"


class Effects(dict[str, Effect]):
    """What is known, and ``known``, which is set as something is."""

    def __init__(self) -> None:
        self.known = asyncio.Event()

    def __setitem__(self, digest: str, effect: Effect) -> None:
        super().__setitem__(digest, effect)
        self.known.set()


class Engine:
    """Its one adapter. ``scores``: what it answers, if the engine is not noisy while clients use adapters."""

    def __init__(self, scores: Scores) -> None:
        self.scores, self.is_idle, self.is_noisy = scores, True, False
        self.asked: asyncio.Queue[str | None] = asyncio.Queue()
        self.effects = Effects()
        self.base_scores: dict[str, Scores] = {}
        record = SimpleNamespace(spec=SimpleNamespace(digest=DIGEST), revision="v1", key=None)
        self.records, self.paths = {ADAPTER: record}, {ADAPTER: "/stage/law"}

    def may_reread(self, name: str) -> bool:
        return False

    @contextmanager
    def lent(self, name: str) -> Iterator[bool]:
        yield True

    async def ask(self, name: str | None, prompt: str) -> Scores:
        self.asked.put_nowait(name)
        await asyncio.sleep(0)  # as an engine lets others run
        if not self.is_idle and self.is_noisy:
            return tuple(score + random.random() * LEAST for score in self.scores)
        return BASE if name is None and self.is_idle else tuple(self.scores)


def noisy() -> Engine:
    """One whose clients do not pause; what the base model says alone is known."""
    engine = Engine(BASE)
    engine.base_scores = dict.fromkeys(PROMPTS, BASE)
    engine.is_idle, engine.is_noisy = False, True
    return engine


@contextmanager
def probing(engine: Engine) -> Iterator[EffectProbe]:
    probe = EffectProbe(
        engine.ask,  # type: ignore[arg-type]
        engine,  # type: ignore[arg-type]
        EventLog(),
        lambda: None,
        pause_s=0,
        retry_s=0,
    )
    running = asyncio.ensure_future(probe.run())
    try:
        yield probe
    finally:
        running.cancel()


async def turns() -> None:
    """Let the probe go as far as it goes: it never waits for a clock here."""
    for _ in range(200):
        await asyncio.sleep(0)


async def test_a_neighbour_accuses_nobody() -> None:
    """While an adapter is in use the base model answers as it does: that is no evidence against it."""
    engine = Engine(OTHER)
    with probing(engine) as probe:
        probe.look()
        for _ in range(5):
            assert await engine.asked.get() is None
            engine.is_idle = False  # a request came meanwhile
            await turns()
            assert (engine.asked.qsize(), engine.base_scores, engine.effects) == (0, {}, {})
            engine.is_idle = True
        await engine.effects.known.wait()
    assert engine.effects == {DIGEST: Effect.SOME}


async def test_a_busy_engine_is_not_asked_for_nothing() -> None:
    """An answer of the base model counts for nothing while an adapter is in use."""
    engine = Engine(BASE)
    engine.is_idle = False
    with probing(engine) as probe:
        probe.look()
        await turns()
        assert engine.asked.empty()


async def test_an_engine_that_becomes_another_one_while_it_is_asked() -> None:
    """A pass forgets the first answers. The probe asks for all of them again, and ends no more than that."""
    engine = Engine(OTHER)
    with probing(engine) as probe:
        probe.look()
        while len(engine.base_scores) < len(PROMPTS) - 1:
            assert await engine.asked.get() is None
        engine.base_scores.clear()
        await asyncio.wait_for(engine.effects.known.wait(), 20)
    assert (engine.effects, len(engine.base_scores)) == ({DIGEST: Effect.SOME}, len(PROMPTS))


async def test_nothing_is_kept_of_bytes_that_are_gone() -> None:
    """Adapters come and go by the thousand, judged and not judged."""
    engine = noisy()
    with probing(engine) as probe:
        probe.look()
        await engine.asked.get()
        assert probe._tries
        engine.effects["sha256:gone"] = Effect.NONE
        probe.keep_only(())
    assert (dict(probe._tries), engine.effects) == ({}, {})


@pytest.mark.parametrize(("scores", "found"), [(BASE, Effect.NONE), (OTHER, Effect.SOME)])
async def test_the_base_model_is_asked_once(scores: Scores, found: Effect) -> None:
    """What it says alone serves for every adapter, also while clients use them."""
    engine = Engine(scores)
    with probing(engine) as probe:
        for is_idle in (True, False):
            engine.is_idle, engine.effects = is_idle, Effects()
            probe.look()
            await engine.effects.known.wait()
            assert engine.effects == {DIGEST: found}
    asked = [engine.asked.get_nowait() for _ in range(engine.asked.qsize())]
    assert asked.count(None) == 2 * len(PROMPTS)


async def test_what_clients_hid_is_found_when_they_pause() -> None:
    """A stream may last longer than all tries beside it: the next look without one finds the adapter."""
    engine = noisy()
    with probing(engine) as probe:
        probe.look()
        asked = [await engine.asked.get() for _ in range(MOST_TRIES * len(PROMPTS) * 2)]
        assert (set(asked), engine.effects) == ({ADAPTER}, {})
        engine.is_idle = True
        probe.look()
        await engine.effects.known.wait()
    assert engine.effects == {DIGEST: Effect.NONE}
