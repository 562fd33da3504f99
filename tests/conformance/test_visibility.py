"""What is told of a mount's delay is the mount's, and not what the machine took to look."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_fs.sidecar.conformance import visibility
from lora_fs.sidecar.conformance.report import Delay
from lora_fs.sidecar.conformance.visibility import Looks

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


def waited(monkeypatch: pytest.MonkeyPatch, clock: Clock, shows_from_s: float) -> Looks:
    monkeypatch.setattr(visibility, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(visibility, "look", clock.looking(shows_from_s))
    return visibility.wait_for_change("bytes", Path("x"), b"new", False, 1.5)


@pytest.mark.parametrize("clock", [Clock(), Clock(look_s=NOT_RUN_S), Clock(late_s=NOT_RUN_S)])
def test_what_shows_at_once(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Whatever the machine took for the look."""
    assert waited(monkeypatch, clock, 0.0) == Looks(vain=None, shown=0.0)


def test_a_pause_that_was_longer_than_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as long as it was meant to be: the mount may have shown the change ever since."""
    looks = waited(monkeypatch, Clock(late_s=NOT_RUN_S), 0.0005)
    assert looks.vain == 0.0
    assert looks.shown is not None
    assert looks.shown < 0.01


def test_what_a_cache_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of old bytes is a second, and what is not seen in time is nothing."""
    looks = waited(monkeypatch, Clock(look_s=0.001), 1.0)
    assert looks.vain is not None
    assert looks.shown is not None
    assert 0.9 < looks.vain < 1.0 <= looks.shown < 1.1
    assert waited(monkeypatch, Clock(look_s=0.001), 20.0).shown is None


def test_a_look_that_began_late() -> None:
    """It bounds the delay from above, and proves no cache; a look in vain proves one."""
    tried = Looks(vain=None, shown=NOT_RUN_S).since(0.0)
    delay = Delay.of("create", "a new file", [tried], 1.5)
    assert (delay.bound_s, delay.usual_s) == (NOT_RUN_S, 0.0)
    kept = Looks(vain=0.5, shown=NOT_RUN_S).since(0.0)
    assert Delay.of("create", "a new file", [kept], 1.5).usual_s == 0.5
