"""The slow volume, one file of which can be held: who reads it waits until it is let go.

Its server is a process of its own. It is told what to hold, and tells who asked, by files beside its source.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.demo import slow_volume
from lora_fs.demo.waiting import wait_until

ASKED_S = 60.0
_LOOK_S = 0.005


class HeldVolume:
    """A folder, and the same folder through the volume.

    Attributes:
        disk: the folder itself.
        mount: what lies in it, as the volume shows it.
    """

    def __init__(self, folder: Path) -> None:
        self.disk, self.mount = folder / "disk", folder / "slow"
        self._hold, self._asked = _hold(self.disk), _asked(self.disk)

    @contextlib.contextmanager
    def holding(self, file: Path) -> Iterator[None]:
        """Answer no read of ``disk / file`` in this block."""
        self._asked.unlink(missing_ok=True)
        draft = self._hold.with_name("draft")
        draft.write_text(str(self.disk / file))
        draft.rename(self._hold)
        try:
            yield
        finally:
            self._hold.unlink()

    def wait_asked(self) -> None:
        """Wait until somebody waits for the file that is held."""
        wait_until("somebody reads what is held", self._asked.exists, timeout_s=ASKED_S)


@contextlib.contextmanager
def held_volume(folder: Path) -> Iterator[HeldVolume]:
    """Mount ``folder / "disk"``, of which nothing is held yet."""
    volume = HeldVolume(folder)
    volume.disk.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slow_volume, "__file__", __file__)  # what its server is started from
        with slow_volume.slow_volume(volume.disk, volume.mount, folder / "slow.log"):
            yield volume


class _Holding(slow_volume.Passthrough):
    def __init__(self, source: Path, mbps: float, latency_s: float) -> None:
        super().__init__(source, mbps, latency_s)
        self._hold, self._asked = _hold(source), _asked(source)

    def _read(self, node: int, body: bytes) -> bytes:
        while os.fsdecode(self._paths[node]) == self._held():
            self._asked.touch()
            time.sleep(_LOOK_S)
        return super()._read(node, body)

    def _held(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return self._hold.read_text()
        return None


def _hold(disk: Path) -> Path:
    return disk.with_name("hold")


def _asked(disk: Path) -> Path:
    return disk.with_name("asked")


if __name__ == "__main__":
    slow_volume.Passthrough = _Holding  # type: ignore[misc]
    slow_volume.main()
