"""What is told of a mount's delay is the mount's, and not what the machine took to look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_fs.sidecar.conformance import visibility

NOT_RUN_S = 0.7  # for so long at once a process of a busy machine may not be run


class Clock:
    """Time goes on in looks and pauses alone; ``late_s`` more in each pause, ``look_s`` in each look."""

    def __init__(self, look_s: float = 0.0, late_s: float = 0.0) -> None:
        self.now, self._look_s, self._late_s = 0.0, look_s, late_s

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s

    def looking(self, shows_from_s: float) -> Callable[[object, object], object]:
        """Old bytes until ``shows_from_s``, by when the look begins."""

        def look(kind: object, path: object) -> object:
            shown = b"new" if self.now >= shows_from_s else b"old"
            self.now += self._look_s
            return shown

        return look


def waited(monkeypatch: pytest.MonkeyPatch, clock: Clock, shows_from_s: float) -> float | None:
    monkeypatch.setattr(visibility, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(visibility, "look", clock.looking(shows_from_s))
    return visibility.wait_for_change("bytes", Path("x"), b"new", False, 1.5)


@pytest.mark.parametrize("clock", [Clock(), Clock(look_s=NOT_RUN_S), Clock(late_s=NOT_RUN_S)])
def test_what_shows_at_once(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Whatever the machine took for the look."""
    assert waited(monkeypatch, clock, 0.0) == 0.0


def test_a_pause_that_was_longer_than_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as long as it was meant to be: the mount may have shown the change ever since."""
    seen = waited(monkeypatch, Clock(late_s=NOT_RUN_S), 0.0005)
    assert seen is not None
    assert seen < 0.01


def test_what_a_cache_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of old bytes is a second, and what is not seen in time is nothing."""
    seen = waited(monkeypatch, Clock(look_s=0.001), 1.0)
    assert seen is not None
    assert 1.0 <= seen < 1.1
    assert waited(monkeypatch, Clock(look_s=0.001), 20.0) is None
