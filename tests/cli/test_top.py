"""``lora-fs top``: a plain table where nobody watches, a screen where somebody does, rates of two reports."""

from __future__ import annotations

import datetime
import io
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from lora_fs.sidecar.cli.top import AdapterLine, Rates, replica_line, screen
from lora_fs.sidecar.model import AdapterStatus, Phase, ReplicaStatus, Scope
from lora_fs.sidecar.registry import atomic
from lora_fs.sidecar.registry.codec import seal
from lora_fs.sidecar.registry.layout import Layout
from tests.cli.conftest import LORA_FS, LoraFs

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
        "phases": ["Failed", "Evicted"],
        "why": "torn is Failed",
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
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(screen(Scope("default", "tiny"), [], lines, None))
    told = console.export_text().splitlines()
    head = next(line for line in told if line.startswith("ADAPTER"))
    assert head.split() == ["ADAPTER", "SERVES", "REPLICAS", "READY", "FAILED", "WHY"]
    (row,) = [line for line in told if line.startswith("legal-ja")]
    assert row.split()[:5] == ["legal-ja", "v1", "FR", "1", "1"]
    assert row.rstrip().endswith("…")


def test_a_terminal_is_drawn_on_until_it_is_left(fleet: Path) -> None:
    """Ctrl-C ends it as it ends every command, and gives the screen back."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [LORA_FS, "top"], stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    while b"torn is" not in seen:
        seen += os.read(ours, 65536)
    child.send_signal(2)
    while b"\x1b[?1049l" not in seen:
        seen += os.read(ours, 65536)
    assert child.wait(20) == 130
    os.close(ours)
    assert b"1 failing" in seen
