"""HEAD: one small file with the last writes. Every writer replaces it. A hint.

A reader that knows one of HEAD's *changes* has missed those after it and no others: it reads the files
they name and lists nothing. Otherwise HEAD says *look*, and the reader lists the tree. Two writers may
replace each other's HEAD. Each looks again a moment later, and announces its change again if HEAD lacks it.
The next listing finds a change that HEAD lost all the same.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from lora_fs.sidecar.errors import CorruptRecord, TemporaryError, VolumeUnavailable
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.registry.format.layout import TEMPORARY, Layout
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder, marked

logger = logging.getLogger(__name__)

READ_BYTES = 4096
MAX_BYTES = 4000  # a writer that keeps what it does not know may add a few
CHECK_AFTER_S = 0.05
CHECKS = 3
RAISES = 16  # of the floor, each of which another writer's HEAD may replace
TORN_S = (0.0, 0.005, 0.02)  # pauses before each look
STALE_S = (0.0, 0.1, 0.4, 1.0)  # as TORN_S; GlusterFS shows the replaced file for a second
MOST_FILES = 40  # of one change: more do not fit
MOST_CHECKED = 64  # changes of one process, of the last CHECK_AFTER_S


class Change(BaseModel):
    """One announcement. ``files``: the generations written, relative to the root."""

    model_config = ConfigDict(frozen=True, extra="allow")

    nonce: str
    files: tuple[str, ...] = ()


class Head(BaseModel):
    """``HEAD``.

    Attributes:
        made: random, of the HEAD that was made where there was none: with another one ``seq`` began anew.
        nonce: makes two writes at one ``seq`` differ.
        gc_floor: the ``seq`` since which gc removed no tombstone. A reader whose last HEAD is older may
            have missed one.
        first: a series that is not there begins with this generation: none that is gone had it.
        changes: the last ones, the newest at the end; that is this HEAD's own or they mean nothing.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    epoch: int = 1
    seq: int = 0
    snap: int = 0
    gc_floor: int = 0
    first: int = Field(default=1, ge=1)
    made: str = ""
    nonce: str = ""
    changes: tuple[Change, ...] = Field(default=())
    sum: str = ""

    def forgot_since(self, seen: Head) -> bool:
        """Whether tombstones may be gone that came after ``seen``."""
        return self.gc_floor > (seen.seq if seen.made == self.made else 0)

    def told(self) -> tuple[Change, ...]:
        """The changes, if they lead to this HEAD: a writer that knows none of them keeps old ones."""
        return self.changes if self.changes and self.changes[-1].nonce == self.nonce else ()

    def since(self, nonce: str) -> tuple[str, ...] | None:
        """The files written after the HEAD of that nonce; None if unknown."""
        files: list[str] = []
        for change in reversed(self.told()):
            if change.nonce == nonce:
                return tuple(files)
            if not change.files:
                return None
            files[:0] = change.files
        return None

    def lacks(self, seq: int, nonce: str) -> bool:
        """Whether the change written as ``seq`` is not among those that led to this HEAD."""
        back = self.seq - seq
        if back < 0:
            return True
        told = self.told()
        return back < len(told) and told[-1 - back].nonce != nonce


def read_head(layout: Layout) -> bytes | None:
    """HEAD's bytes, for a comparison with the last ones; None if unknown.

    If HEAD is unreadable, readers scan the tree: a hint stops nobody.
    """
    try:
        return atomic.read_bytes(layout.head, limit_bytes=READ_BYTES)
    except VolumeUnavailable:
        return None


def parse_head(data: bytes | None) -> Head | None:
    """Parse HEAD; None if it is absent or damaged."""
    try:
        return decode(Head, data) if data else None
    except CorruptRecord:
        return None


def current_head(layout: Layout) -> Head | None:
    """HEAD; None if it is not there or damaged, rather than torn.

    Where a rename takes two steps (sshfs), a read is sometimes torn. A HEAD made anew for
    that would lack what only HEAD says.

    Raises:
        VolumeUnavailable: it cannot be read.
    """
    for pause_s in TORN_S:
        if pause_s:  # a sleep of 0 lets another thread of the process go first
            time.sleep(pause_s)
        head = parse_head(read_head(layout))
        if head is not None:
            return head
    for pause_s in STALE_S:
        time.sleep(pause_s)
        try:
            return parse_head(_read_newest(layout))
        except atomic.NotRegular:
            return None
        except VolumeUnavailable as error:
            if pause_s == STALE_S[-1] or getattr(error.__cause__, "errno", None) != errno.ESTALE:
                raise
    raise AssertionError("unreachable")


def _read_newest(layout: Layout) -> bytes | None:
    """HEAD as the server has it. Raises VolumeUnavailable.

    NFS and GlusterFS may open the file that another client has replaced, and fail to read it, for seconds.
    A link to it reaches the server, and what has a name of its own is not gone when it is read.
    """
    try:
        return atomic.read_bytes(layout.head, limit_bytes=READ_BYTES)
    except VolumeUnavailable as error:
        if getattr(error.__cause__, "errno", None) != errno.ESTALE:
            raise
        probe = layout.leases / f"{TEMPORARY}{secrets.token_hex(16)}"
        try:
            os.link(layout.head, probe, follow_symlinks=False)
        except OSError:
            raise error from error.__cause__
        try:
            return atomic.read_bytes(probe, limit_bytes=READ_BYTES)
        finally:
            atomic.discard(probe)


def raise_floor(layout: Layout, epoch: int, seq: int, first: int) -> None:
    """Let HEAD tell that tombstones written by ``seq``, of generations below ``first``, may be gone.

    Raises:
        TemporaryError: it does not tell.
    """
    for _ in range(RAISES):
        head = current_head(layout) or Head()
        if head.gc_floor >= seq and head.first >= first:
            return
        floor = {"gc_floor": max(seq, head.gc_floor), "first": max(first, head.first)}
        advance_head(layout, epoch, floor=floor)
    raise VolumeUnavailable(f"{layout.head} is replaced by others time and again: try again")


def advance_head(
    layout: Layout, epoch: int, files: tuple[str, ...] = (), floor: Mapping[str, int] | None = None
) -> Head:
    """Replace HEAD so that every reader looks. A damaged or missing one is made anew.

    Args:
        files: the generations just written; none: readers list the tree.
        floor: ``gc_floor`` and ``first``, where they rise.
    Raises:
        VolumeUnavailable: the volume does not read it, or does not replace it.
    """
    head = current_head(layout) or Head(made=secrets.token_hex(8))
    change = Change(nonce=secrets.token_hex(8), files=files)
    fields = {"epoch": epoch, "seq": head.seq + 1, "nonce": change.nonce, **(floor or {})}
    before = head.told() or ((Change(nonce=head.nonce),) if head.nonce else ())
    changes = (*before, change) if files and head.epoch == epoch else ()
    after = head.model_copy(update={**fields, "changes": changes})
    while len(data := seal(after)) > MAX_BYTES and after.changes:
        fewer = after.changes[1:] if len(after.changes) > 2 else ()
        after = after.model_copy(update={"changes": fewer})
    try:
        _put(layout, data)
    except VolumeUnavailable as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        make_folder(layout.leases, root=layout.root)
        _put(layout, data)
    return after


def _put(layout: Layout, data: bytes) -> None:
    """Let HEAD hold ``data``, in a root that holds the marker."""
    with atomic.explained(f"cannot replace {layout.head}"), marked(layout.root) as handle:
        atomic.replace(layout.head, data, draft_in=layout.leases, into=handle)


class _Written(threading.local):
    """A thread's writes and finds that it has not announced: each thread announces its own."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.own = False


class Announcer:
    """Tells readers what this process wrote, and makes sure of it a moment later."""

    def __init__(self, layout: Layout, clock: Callable[[], float] = time.monotonic) -> None:
        self._layout, self._clock = layout, clock
        self._written = _Written()
        self._lock = threading.Lock()
        self._unchecked: list[tuple[float, int, Head]] = []  # when, checks left, as written

    def note(self, path: Path, *, found: bool = False) -> None:
        """Remember a generation for this thread's next announcement.

        Args:
            found: another writer wrote it before, and may have announced it.
        """
        files = self._written.files
        self._written.own |= not found
        name = path.relative_to(self._layout.root).as_posix()
        if len(files) <= MOST_FILES and name not in files:
            files.append(name)

    def announce(self, epoch: int) -> None:
        """Replace HEAD; where this thread noted nothing, or too much, it says no more than *look*.

        A failure delays readers until their next listing, no more.
        """
        files, own = tuple(self._written.files), self._written.own
        self._written.files, self._written.own = [], False
        try:
            self._advance(epoch, files if len(files) <= MOST_FILES else (), CHECKS)
        except TemporaryError as error:
            if own or not files:  # the writer of a found one announced it, or soon will
                told = event("head.not_written")
                logger.warning("written, and seen by others at their next scan only: %s", error, extra=told)

    def check(self, *, wait: bool = False) -> None:
        """Announce again what another writer's HEAD replaced. Raises nothing: HEAD is a hint."""
        while True:
            with self._lock:
                if not self._unchecked:
                    return
                due, left, written = self._unchecked[0]
                remaining = due - self._clock()
                if remaining > 0 and not wait:
                    return
                self._unchecked.pop(0)
            if remaining > 0:
                time.sleep(remaining)
            now = parse_head(read_head(self._layout))
            if now is not None and now.epoch == written.epoch and now.lacks(written.seq, written.nonce):
                own = written.told()[-1:]
                try:
                    self._advance(written.epoch, own[0].files if own else (), left - 1)
                except TemporaryError:
                    return

    def _advance(self, epoch: int, files: tuple[str, ...], checks: int) -> None:
        written = advance_head(self._layout, epoch, files)
        if checks:
            with self._lock:
                self._unchecked.append((self._clock() + CHECK_AFTER_S, checks, written))
                del self._unchecked[:-MOST_CHECKED]
