"""What is known of a stock engine's memory, beside an LRU as vLLM has one."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.reconcile.residents.engine_memory import EngineMemory

NAMES = st.sampled_from("abcde")
STEPS = st.lists(st.tuples(st.sampled_from(["load", "use", "refused", "unload", "fail"]), NAMES), max_size=60)


class Lru:
    """vLLM's: an unloaded adapter stays until it is the one longest unused; a reload has another number."""

    def __init__(self, keeps: int) -> None:
        self.keeps = keeps
        self.numbers: dict[str, int] = {}
        self.memory: OrderedDict[int, None] = OrderedDict()
        self._next = 0

    def load(self, name: str | None) -> None:
        """Load under a new number; without a name it failed after it took a place."""
        self._next += 1
        if name is not None:
            self.numbers[name] = self._next
        self._touch(self._next)

    def use(self, name: str) -> None:
        """Compute a request."""
        self._touch(self.numbers[name])

    def has(self, name: str) -> bool:
        """Whether a step need not read it."""
        return self.numbers[name] in self.memory

    def _touch(self, number: int) -> None:
        self.memory[number] = None
        self.memory.move_to_end(number)
        while len(self.memory) > self.keeps:
            self.memory.popitem(last=False)


@given(steps=STEPS, keeps=st.integers(1, 4))
def test_what_is_said_to_be_kept_is_in_the_engines_memory(steps: list[tuple[str, str]], keeps: int) -> None:
    """Surely, if some requests that ended were never computed; likely, if all were."""
    engine, surely, likely = Lru(keeps), EngineMemory(), EngineMemory()
    last_used: dict[str, float] = {}
    for now, (step, name) in enumerate(steps):
        loaded = name in engine.numbers
        if step == "load" and not loaded:
            engine.load(name)
            surely.loaded(name, now)
            likely.loaded(name, now)
            last_used[name] = now
        elif step == "fail":
            engine.load(None)
            surely.passed(now)
            likely.passed(now)
        elif step == "use" and loaded:
            engine.use(name)
            surely.used(name, now)
            likely.used(name, now)
            last_used[name] = now
        elif step == "refused" and loaded:
            surely.used(name, now)
        elif step == "unload" and loaded:
            del engine.numbers[name]
            surely.unloaded(name, last_used[name])
            likely.unloaded(name, last_used[name])
        others = len(engine.numbers) - 1
        for one in engine.numbers:
            assert engine.has(one) or not surely.surely_keeps(one, others, keeps)
            assert engine.has(one) or not likely.likely_keeps(one, others, keeps)


def test_a_used_adapter_outlasts_the_unloaded_ones() -> None:
    """What was unloaded before its last request counts no more against it."""
    memory = EngineMemory()
    memory.loaded("hot", 1)
    memory.loaded("cold", 2)
    memory.used("hot", 3)
    memory.unloaded("cold", 2)
    memory.loaded("next", 4)
    assert memory.likely_keeps("hot", 1, 2)
    assert not memory.surely_keeps("hot", 1, 2)


def test_what_an_earlier_process_loaded_is_not_known_to_be_kept() -> None:
    """It may have been dropped before this process began, though few are loaded."""
    memory = EngineMemory()
    assert not memory.likely_keeps("found", 0, 4)
    memory.loaded("found", 1)
    assert memory.surely_keeps("found", 0, 4)
