"""The audit file's lines stay whole, and hold no secret, whatever happens to the file."""

from __future__ import annotations

import json
import logging
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_fs.sidecar import audit


def test_a_line_that_a_full_disk_cut(tmp_path: Path) -> None:
    """It ends where the room ended, and the message says so. The next line begins on a line of its own."""
    file, complaints = tmp_path / "audit", list[str]()

    def write(number: int) -> None:
        text = audit.line("register", who="me", source="cli", outcome="done", what={"n": number})
        audit.write(file, text, complaints.append)

    write(1)
    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    signals = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, bounds[1]))
    try:
        write(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)
        signal.signal(signal.SIGXFSZ, signals)
    assert complaints == [f"the audit line is not in {file}: it took a part of the line only"]
    write(3)
    write(4)
    first, cut, *others = file.read_text().splitlines()
    assert [json.loads(one)["what"]["n"] for one in (first, *others)] == [1, 3, 4]
    assert len(cut) == 40


def test_writers_beside_each_other(tmp_path: Path) -> None:
    """Each line is there, whole. A writer that stands still within one costs an empty line at most."""
    file = tmp_path / "audit"

    def write(who: int) -> None:
        for number in range(100):
            what = {"n": number, "text": "x" * 900}
            audit.write(file, audit.line("register", who=str(who), source="cli", outcome="done", what=what))

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(write, range(6)))
    told = map(json.loads, filter(None, file.read_text().splitlines()))
    assert sorted((one["who"], one["what"]["n"]) for one in told) == [
        (str(who), number) for who in range(6) for number in range(100)
    ]


def test_a_quiet_log_has_the_audit(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever level the settings give the other lines."""
    with caplog.at_level("ERROR", "lora_fs"):
        assert audit.logger.isEnabledFor(logging.INFO)


def test_no_line_has_a_secret() -> None:
    """What stands in an address, with an @ in it or behind it, as in the log."""
    source = "https://me:pass@word@hub.example/x.tar?X-Amz-Signature=4711"
    text = audit.line(
        "register", who="me", source="cli", outcome="failed", what={"source": source}, why=source
    )
    assert "hub.example/x.tar" in text
    assert [one for one in ("pass", "word", "4711") if one in text] == []
