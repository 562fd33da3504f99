"""Audit lines: who did what, when, from where, and how it ended. One JSON object a line.

Every line goes to the logger ``lora_fs.audit``, and to a file, if the settings name one, which only
grows. A failed write of a line does not fail the act, and the log says so. No line holds a
token: a token appears by its name.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lora_fs.sidecar.logs import event, strike

logger = logging.getLogger("lora_fs.audit")
logger.setLevel(logging.INFO)  # whatever the other loggers do

MAX_TEXT = 1000
SETTLED_S = 0.02


def line(
    act: str,
    *,
    who: str,
    source: str,
    outcome: str,
    what: Mapping[str, object],
    why: str = "",
) -> str:
    """One line without its end.

    Args:
        act: what was done: ``register``, ``unregister``, ``quota`` …
        who: ``token:NAME``, ``anonymous``, or ``user@host:pid`` of a command.
        source: the client's address, or ``cli``.
        outcome: ``done``, ``denied`` or ``failed``, and then ``why``.
        what: what it was done to; None is left out.
    """
    told: dict[str, Any] = {
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        "who": who,
        "from": source,
        "act": act,
        "outcome": outcome,
        "what": {name: _short(value) for name, value in what.items() if value is not None},
    }
    if why:
        told["why"] = _short(why)
    return json.dumps(told)


def _short(value: object) -> object:
    if isinstance(value, bool | int | float):
        return value
    text = strike(str(value))
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"


def write(file: Path | None, text: str, complain: Callable[[str], None] = logger.warning) -> None:
    """Tell a line. Blocking where there is a file.

    Args:
        complain: gets the reason why the line is not in the file; the call raises nothing.
    """
    logger.info("%s", text, extra=event("audit"))
    if file is None:
        return
    try:
        _append(file, text.encode() + b"\n")
    except OSError as error:
        complain(f"the audit line is not in {file}: {error.strerror or error}")


def _append(file: Path, data: bytes) -> None:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(file, flags, 0o600)
    try:
        if stat.S_ISREG(os.fstat(handle).st_mode):
            os.set_blocking(handle, True)
            data = b"\n" + data if _is_torn(file) else data
        if os.write(handle, data) != len(data):
            raise OSError(errno.ENOSPC, "it took a part of the line only")
    finally:
        os.close(handle)


def _is_torn(file: Path) -> bool:
    """Return whether the last line has no end: its disk was full. The next line must not continue it."""
    with suppress(OSError):
        end = _end(file)
        if end[1] != b"\n":
            time.sleep(SETTLED_S)  # else another process is in the middle of its write
            return _end(file) == end
    return False


def _end(file: Path) -> tuple[int, bytes]:
    with file.open("rb") as written:
        return written.seek(-1, os.SEEK_END), written.read(1)
