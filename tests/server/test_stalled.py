"""Files that do not answer: every caller has an answer in time, and few threads wait for them."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from fastapi import HTTPException
from starlette.datastructures import Headers

from lora_fs.sidecar import audit
from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.server.dashboard import board
from lora_fs.sidecar.server.dashboard.board import Board
from lora_fs.sidecar.server.dashboard.fleet import Fleet
from lora_fs.sidecar.server.middleware import access, tokens
from lora_fs.sidecar.server.middleware import audit as trail
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.ports import Served
from tests.reconcile.test_plan import RECORD
from tests.server.conftest import FakeReplica

pytestmark = pytest.mark.anyio

SOON_S = 0.05
BOUND_S = 60
CALLERS = 7


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Hang:
    """A call that does not come back before the test ends."""

    def __init__(self) -> None:
        self.go, self.begun = threading.Event(), threading.Semaphore(0)

    def __call__(self, *_: object) -> bytes:
        self.begun.release()
        self.go.wait(BOUND_S)
        return b""

    def times(self) -> int:
        """How often it was begun, each of which took a thread."""
        return sum(iter(lambda: self.begun.acquire(blocking=False), False))


@pytest.fixture
def hang() -> Iterator[Hang]:
    one = Hang()
    yield one
    one.go.set()


async def test_the_token_file(hang: Hang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever shows a token is answered 503; one that was not read just now is not waited for anew."""
    monkeypatch.setattr(access, "READ_WAIT_S", SOON_S)
    monkeypatch.setattr(tokens, "_contents", hang)
    admin = Admin(tmp_path / "tokens", ("-",))
    for _ in range(CALLERS):
        with pytest.raises(HTTPException, match="was not read") as told:
            await admin.sight(Headers({access.HEADER: "one"}))
        assert told.value.status_code == 503
    assert hang.times() == 1
    monkeypatch.setattr(access, "FRESH_S", 0)
    for _ in range(CALLERS):
        with pytest.raises(HTTPException, match="was not read"):
            await admin.sight(Headers({access.HEADER: "one"}))
    assert hang.times() == access.AT_ONCE - 1 < CALLERS


async def test_the_audit_file(
    hang: Hang, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No act waits for it for long; its line is in the log, and that it is not in the file."""
    caplog.set_level(logging.INFO, audit.logger.name)
    monkeypatch.setattr(trail, "WRITE_WAIT_S", SOON_S)
    monkeypatch.setattr(audit, "_append", hang)
    told = Trail(tmp_path / "audit")
    for number in range(CALLERS):
        await told.tell("register", None, "here", "done", "", {"number": number})
    assert hang.times() == trail.AT_ONCE < CALLERS
    lines = [record.getMessage() for record in caplog.records]
    written = [json.loads(line)["what"]["number"] for line in lines if line.startswith("{")]
    assert written == list(range(CALLERS))
    assert sum("it did not answer" in line for line in lines) == CALLERS


async def test_the_other_replicas_reports(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks what the replicas say of an adapter is told that it was not read."""
    monkeypatch.setattr(board, "LOOK_S", SOON_S)
    shown = Board(FakeReplica(), cast("Fleet", SimpleNamespace(of=hang)))
    for _ in range(CALLERS):
        with pytest.raises(VolumeUnavailable, match="were not read"):
            await shown.described(Served("a1", RECORD))
    assert hang.times() == board.READS < CALLERS
