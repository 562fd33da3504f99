"""Which loaded adapters a stock engine still has in memory. Pure: times come in, on a monotonic clock.

vLLM keeps ``--max-cpu-loras`` adapters and drops the one longest unused. An unloaded one stays until then, in
the place of another. So vLLM drops an adapter only after requests used that many others since its own last
use. vLLM reads a dropped one again in the middle of a step. The adapters of one step are equally old to it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_MOST = 4096  # no engine keeps more


class EngineMemory:
    """Loads, uses and unloads, as far as they matter to the adapters that are still loaded."""

    def __init__(self) -> None:
        self._loaded: dict[str, float] = {}  # an answer to a load is certain
        self._used: dict[str, float] = {}  # the engine may have refused an ended request before it computed
        self._passed: list[float] = []  # the last use of each that is no longer loaded, sorted

    def loaded(self, name: str, since: float) -> None:
        """Note a load that succeeded and began at ``since``."""
        self._loaded[name] = self._used[name] = since

    def used(self, name: str, since: float) -> None:
        """Note a request that has ended and began at ``since``."""
        self._used[name] = max(since, self._used.get(name, since))

    def passed(self, last_used: float) -> None:
        """Note an adapter that takes a place and is not, or not any more, loaded by any name."""
        insort(self._passed, last_used)
        del self._passed[:-_MOST]

    def unloaded(self, name: str, last_used: float) -> None:
        """Note that ``name`` is no longer loaded; nobody used it after ``last_used``."""
        self._loaded.pop(name, None)
        self._used.pop(name, None)
        self.passed(last_used)

    def surely_keeps(self, name: str, others: int, keeps: int) -> bool:
        """Whether the engine has ``name``, whatever became of the requests for it.

        Args:
            others: how many others are loaded; each may have been used since.
            keeps: how many adapters the engine has in memory at most.
        """
        return self._is_within(self._loaded.get(name), others, keeps)

    def likely_keeps(self, name: str, others: int, keeps: int) -> bool:
        """Whether the engine has ``name`` if it computed each ended request. Args as above."""
        return self._is_within(self._used.get(name), others, keeps)

    def _is_within(self, since: float | None, others: int, keeps: int) -> bool:
        if since is None:  # an earlier process loaded it: later loads are unknown
            return False
        passed = len(self._passed) - bisect_left(self._passed, since)
        return others + passed < keeps
