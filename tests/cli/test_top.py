"""``lora-fs top``: a plain table where nobody watches, a screen where somebody does, rates of two reports."""

from __future__ import annotations

import datetime
import io
import os
import pty
import select
import subprocess
import termios
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lora_fs.sidecar.cli.look.top import AdapterLine, Rates, Sight, replica_line, screen
from lora_fs.sidecar.model import AdapterStatus, Phase, ReplicaStatus
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.volume import atomic
from tests.cli.conftest import LORA_FS, LoraFs, interruptible

START = datetime.datetime.now(datetime.UTC)


def report(replica: str = "r0", after_s: float = 0, hits: float = 0, **phases: Phase) -> ReplicaStatus:
    """A report some seconds after the first one."""
    return ReplicaStatus(
        replica=replica,
        model="tiny",
        namespaces=("default",),
        engine="ready",
        updated_at=(START + datetime.timedelta(seconds=after_s)).isoformat(),
        adapters={
            name: AdapterStatus(
                key=("default", "tiny", "v1", name), generation=1, phase=phase, message=f"{name} is {phase}"
            )
            for name, phase in phases.items()
        },
        figures={"request_hits": hits, "request_misses": 2, "tier_disk": 3, "loads": hits / 10},
    )


def frame(sight: Sight, height: int = 24, width: int = 80) -> list[str]:
    """The lines that a terminal of that size is shown."""
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(screen("default/tiny", sight, height))
    return console.export_text().splitlines()


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first report is of this test's beginning: an old one is of a replica that is gone."""
    monkeypatch.setitem(globals(), "START", datetime.datetime.now(datetime.UTC))


@pytest.fixture
def fleet(lora_fs: LoraFs, folder: Callable[[int], str], root: Path) -> Path:
    for seed, name in enumerate(("good", "idle", "torn")):
        assert lora_fs("register", name, folder(seed), "--revision", "v1").code == 0
    layout = Layout(root)
    layout.replicas.mkdir(exist_ok=True)
    for one in (report("r0", hits=8, good=Phase.READY, torn=Phase.FAILED), report("r1", good=Phase.LOADING)):
        atomic.replace(layout.replica(one.replica), seal(one))
    return root


def test_one_plain_table(lora_fs: LoraFs, fleet: Path) -> None:
    """Each replica, then each adapter: what is in trouble comes first."""
    told = lora_fs("top").out.splitlines()
    assert told == lora_fs("top", "--once").out.splitlines()
    replicas, adapters = told[1:3], told[5:]
    first, second = (line.split()[:5] for line in replicas)
    assert (first, second) == (["r0", "ready", "1", "1", "-"], ["r1", "ready", "0", "0", "-"])
    assert "80.0 %" in replicas[0]
    shown = [line.split()[:3] for line in adapters]
    assert shown == [["torn", "v1", "F·"], ["good", "v1", "Rl"], ["idle", "v1", "··"]]
    assert adapters[0].endswith("torn is Failed")


def test_json(lora_fs: LoraFs, fleet: Path) -> None:
    """The same for scripts; what is not known is null."""
    told = lora_fs("top", "-o", "json").json
    assert [one["replica"] for one in told["replicas"]] == ["r0", "r1"]
    assert told["replicas"][0]["disk"] == 3
    assert told["replicas"][0]["gpu"] is None
    assert told["replicas"][0]["requests_per_s"] is None
    assert told["adapters"][0] == {
        "adapter": "torn",
        "revision": "v1",
        "phases": ["Failed", "Unloaded"],
        "why": "torn is Failed",
        "namespace": "default",
    }


def test_rates_are_between_two_reports() -> None:
    """Until the second one they are not known; a replica that started anew has done nothing, not less."""
    rates = Rates()
    assert "r0" not in rates.note([report()])
    known = rates.note([report(after_s=10, hits=50)])
    assert known["r0"]["request_hits"] == 5.0
    line = replica_line(report(after_s=10, hits=50), known["r0"])
    assert (line.requests_per_s, line.loads_per_s) == (5.0, 0.5)
    assert rates.note([report(after_s=10, hits=50)])["r0"]["request_hits"] == 5.0
    assert rates.note([report(after_s=20, hits=0)])["r0"]["request_hits"] == 0.0


def test_a_long_reason_gives_way() -> None:
    """It is cut where the terminal ends, and no other column is."""
    why = "default/tiny/v1/legal-ja cannot be served: " + "the bytes are not the registered ones " * 5
    lines = [
        AdapterLine("legal-ja", "v1", (Phase.FAILED, Phase.READY), why),
        AdapterLine("good", "v2", (), ""),
    ]
    told = frame(Sight([], lines, {}))
    head = next(line for line in told if line.startswith("ADAPTER"))
    assert head.split() == ["ADAPTER", "SERVES", "REPLICAS", "READY", "FAILED", "WHY"]
    (row,) = [line for line in told if line.startswith("legal-ja")]
    assert row.split()[:5] == ["legal-ja", "v1", "FR", "1", "1"]
    assert row.rstrip().endswith("…")


def test_many_replicas_leave_room_for_adapters() -> None:
    """Those in trouble stay, and how many are not shown is said; where all have room, as they come."""
    replicas = [
        replace(replica_line(report(), None), replica=f"r{n:02}", state="stale" if n == 40 else "ready")
        for n in range(50)
    ]
    adapters = [AdapterLine("broken", "v1", (Phase.FAILED,), "why")]

    def shown(height: int) -> list[str]:
        return frame(Sight(replicas, adapters, {}), height, 120)

    told = shown(24)
    assert [line.split()[0] for line in told if line.startswith("r")][:3] == ["r40", "r00", "r01"]
    assert "and 41 more" in told
    assert next(at for at, line in enumerate(told) if line.startswith("broken")) < 24
    assert [line[:3] for line in shown(200) if line.startswith("r")] == [one.replica for one in replicas]


def watched(until: bytes, times: int = 1, size: tuple[int, int] | None = None, **environment: str) -> bytes:
    """Return what ``top`` writes until it shows ``until`` so often, and after Ctrl-C to its end.

    However long a busy machine takes: the time that pytest gives a test is the only bound.
    """
    ours, theirs = pty.openpty()
    if size is not None:
        termios.tcsetwinsize(theirs, size)
    with interruptible():
        child = subprocess.Popen(
            [LORA_FS, "top"], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, **environment}
        )
    os.close(theirs)
    seen = b""
    with child:
        try:
            while seen.count(until) < times and child.poll() is None:
                if select.select([ours], [], [], 1.0)[0]:
                    seen += os.read(ours, 65536)
            child.send_signal(2)
            with suppress(OSError):  # what a terminal answers once nobody has its other end
                while data := os.read(ours, 65536):
                    seen += data
            assert child.wait() == 130, seen
        finally:
            child.kill()
            os.close(ours)
    assert seen.count(until) >= times, seen
    return seen


def test_a_terminal_is_drawn_on_until_it_is_left(fleet: Path) -> None:
    """Ctrl-C ends it as it ends every command, and gives the screen back."""
    seen = watched(b"torn is", TERM="xterm")
    assert b"1 failing" in seen
    assert b"\x1b[?1049l" in seen


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_be_drawn_on(fleet: Path, term: str) -> None:
    """It gets the plain tables, again and again, and nothing that it would have to act on."""
    seen = watched(b"torn is", 2, TERM=term)
    assert seen.count(b"ADAPTER") >= 2
    assert b"\x1b" not in seen


@pytest.mark.parametrize("size", [(0, 0), (30, 100)])
def test_a_size_of_nothing_is_none(fleet: Path, size: tuple[int, int]) -> None:
    """``COLUMNS=0 LINES=0`` is as if they were not set: the terminal's own size counts, if it has one."""
    seen = watched(b"torn is", size=size, TERM="xterm", COLUMNS="0", LINES="0")
    assert b"REPLICA" in seen
    assert b"1 failing" in seen


def test_a_terminal_without_the_characters(fleet: Path) -> None:
    """What its encoding lacks is escaped, and the screen is given back."""
    seen = watched(b"torn is", TERM="xterm", PYTHONIOENCODING="ascii", COLUMNS="100")
    assert b"\\xb7" in seen
    assert b"Traceback" not in seen
    assert b"\x1b[?1049l" in seen


def test_reports_that_cannot_be_read_are_shown(fleet: Path) -> None:
    """On the screen as with ``--once``: they may be why a replica is missing."""
    (fleet / ".replicas" / "r2.json").write_text("{")
    assert b"the report of r2 cannot be read" in watched(b"torn is", TERM="xterm", COLUMNS="200")


def test_troubles_leave_room() -> None:
    """A line each, the first three, and how many more; a volume that does not answer comes first."""
    sight = Sight([], [], {f"r{n}": "torn\n\x1b[2J" * 40 for n in range(9)}, lost="the volume hangs")
    told = frame(sight)
    assert told[1] == "shown as it was before: the volume hangs"
    for n, line in enumerate(told[2:4]):
        assert line.startswith(f"the report of r{n} cannot be read: torn")
    assert told[4].strip() == "and 7 more"
    assert told[6].startswith("REPLICA")
    assert "\x1b" not in "".join(told)
