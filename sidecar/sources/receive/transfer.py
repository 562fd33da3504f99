"""Fetch one piece into a file: resumed, in parallel where that helps, hashed as it arrives.

It begins with one connection. If the rest would take longer than SPLIT_S at the rate so far, it halves the
largest rests. As many connections again take the second halves, up to STREAMS. If that raised the rate
by less than RAISED, it adds no more. So a fast server gets one request, a slow one parallel ones,
and no setting says which. A thread follows with the hash, out of the page cache.
Every CHECKPOINT_S a file beside it lists what is on the disk. The next caller resumes there after
a kill, a broken connection or a power loss.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lora_fs.sidecar.errors import InputError, LoraFsError, SourceUnavailable, TooLarge
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.sources.offer import Changed, Meter, NotRanged, Piece
from lora_fs.sidecar.sources.receive.hashing import CHUNK_BYTES, Hash, Hasher, check, hash_of
from lora_fs.sidecar.sources.receive.part import Part, no_access
from lora_fs.sidecar.sources.receive.spans import Span, Spans

STREAMS = 8
SPLIT_S = 3.0
RAISED = 1.2
LEAST_SPLIT_BYTES = 8 << 20
CHECKPOINT_S = 1.0
RATE_S = 1.0
TICK_S = 0.05
TRIES = 5  # in a row without a byte
BACKOFF_S = 0.5
MOST_WAIT_S = 60.0  # of what a server says to wait

logger = logging.getLogger(__name__)


def fetch(piece: Piece, target: Path, parts: Path, uri: str, meter: Meter, before_bytes: int = 0) -> str:
    """Fetch a piece into ``target``, which lies there whole or not at all; returns its SHA-256.

    Args:
        parts: the folder where it lies until then.
        before_bytes: what arrived of other pieces of the same offer.
    Raises:
        InputError: it is larger than it may be, or its bytes are not those it has to have.
        SourceUnavailable: not all arrived; the next call resumes. Changed: the bytes are of no use.
        VolumeUnavailable: the volume does not take the file.
    """
    if target.is_file() and target.stat().st_size == (piece.size_bytes or -1):
        return check(piece, target, uri, hash_of(target, piece))  # from a killed process's fetch
    for attempt in range(TRIES):
        work = _Fetch(piece, target, parts, uri, meter, before_bytes)
        try:
            hashed = work.run()
        except NotRanged as error:
            if attempt == TRIES - 1:
                raise SourceUnavailable(f"{uri}: {error}, and broke off {TRIES} times") from error
            work.part.forget()
            piece = replace(piece, ranged=False)
            until = time.monotonic() + _told_s(error.__cause__)
            while (left := until - time.monotonic()) > 0:
                meter.check_time(uri)
                time.sleep(min(left, TICK_S))
            continue
        except Changed:
            work.part.forget()
            raise
        return work.placed(hashed)
    raise AssertionError("unreachable")


def _told_s(error: BaseException | None) -> float:
    """How long the server said to wait, within bounds; 0 where it did not say."""
    told: float = vars(error).get("retry_after_s", 0.0) if isinstance(error, SourceUnavailable) else 0.0
    return min(told, MOST_WAIT_S)


class _Fetch:
    """One try. The calling thread splits, reports and writes checkpoints; others read and hash."""

    def __init__(
        self, piece: Piece, target: Path, parts: Path, uri: str, meter: Meter, before_bytes: int
    ) -> None:
        self._piece, self._target, self._uri, self._meter = piece, target, uri, meter
        self._before_bytes = before_bytes
        self.part = Part(piece, parts)
        self._wake = threading.Condition()
        self._stopped = False
        self._failure: LoraFsError | None = None
        self._ended_at: int | None = piece.size_bytes
        self._spans = Spans(0)
        self._rate_before: float | None = 0.0  # the last split; None: another one would not help

    # -- the calling thread --------------------------------------------------------------------

    def run(self) -> Hash:
        """Fetch and hash all of it."""
        try:
            self._open()
            hasher = Hasher(self._piece)
            hashing = threading.Thread(target=self._follow, args=(hasher,), name="fetch-hash", daemon=True)
            hashing.start()
            try:
                self._watch(hashing)
            except BaseException:
                self._stop()
                with suppress(OSError):
                    self.part.note(self._spans.ranges())
                raise
            self._stop()
            return hasher.done()
        except OSError as error:
            raise no_access(self.part.path, error) from error

    def placed(self, hashed: Hash) -> str:
        """Check what has arrived and give it its name; returns its SHA-256."""
        try:
            check(self._piece, self.part.path, self._uri, hashed)
            self.part.place(self._target)
        except InputError:
            self.part.forget()
            raise
        except OSError as error:
            raise no_access(self.part.path, error) from error
        return hashed.sha256

    def _watch(self, hashing: threading.Thread) -> None:
        noted_at = time.monotonic()
        rated, rated_at = self._spans.arrived, None
        while True:
            with self._wake:
                self._wake.wait(TICK_S)
                if self._failure is not None:
                    raise self._failure
            self._meter.check_time(self._uri)
            arrived, now = self._spans.arrived, time.monotonic()
            self._meter.tell(self._before_bytes + arrived, self._meter.total)
            if not self._spans.taken and not hashing.is_alive():
                if self._failure is not None:
                    raise self._failure
                return
            self._begin_idle()
            if rated_at is None:
                rated_at = now if arrived > rated else None  # what the first byte takes is no rate
                rated = arrived
            elif now - rated_at >= RATE_S:
                self._split((arrived - rated) / (now - rated_at))
                rated, rated_at = arrived, now
            if now - noted_at >= CHECKPOINT_S:
                self.part.note(self._spans.ranges())
                noted_at = now

    def _open(self) -> None:
        """Take up what an earlier try left, and begin."""
        size, arrived = self._piece.size_bytes, self.part.begin()
        self._spans = Spans(size if size is not None else self._meter.most_bytes + 1, arrived)
        self._begin_idle()

    def _begin_idle(self) -> None:
        for span in self._spans.idle()[: STREAMS - self._spans.taken]:
            self._begin(span)

    def _begin(self, span: Span) -> None:
        span.taken = True
        threading.Thread(target=self._work, args=(span,), name="fetch", daemon=True).start()

    def _split(self, rate: float) -> None:
        """Let other connections help, if the rest would take long and the last ones did help."""
        running = self._spans.taken
        if not self._piece.ranged or self._piece.size_bytes is None or self._rate_before is None:
            return
        if self._spans.left < rate * SPLIT_S or running >= STREAMS:
            return
        if rate < self._rate_before * RAISED:
            self._rate_before = None
            return
        self._rate_before = rate
        for span in self._spans.halve(min(running, STREAMS - running), LEAST_SPLIT_BYTES):
            self._begin(span)

    def _stop(self) -> None:
        """Let no thread write another byte, whatever they still wait for."""
        with self._wake:
            self._stopped = True
            self._wake.notify_all()
        for span in self._spans:
            with span.lock:
                pass

    # -- the other threads ---------------------------------------------------------------------

    def _work(self, span: Span) -> None:
        try:
            fd = os.open(self.part.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._read(span, fd)
            finally:
                os.close(fd)
        except LoraFsError as error:
            self._fail(error)
        except OSError as error:
            self._fail(no_access(self.part.path, error))
        except Exception as error:  # log a source's own fault, and end this fetch alone
            told = event("source.failed", uri=self._uri)
            logger.exception("the source of %s failed", self._uri, extra=told)
            self._fail(SourceUnavailable(f"{self._uri}: {type(error).__name__} in the source"))
        finally:
            span.taken = False
            with self._wake:
                self._wake.notify_all()

    def _read(self, span: Span, fd: int) -> None:
        tries = 0
        while span.left and not self._stopped:
            before = span.at
            try:
                whole = span.at == 0 and span.end == (self._ended_at or span.end)
                with self._piece.read(span.at, None if whole else span.end) as chunks:
                    for chunk in chunks:
                        if not self._keep(span, fd, chunk):
                            return
                if self._ended_at is None:  # the server did not say how long it is
                    self._ended_at = span.end = span.at
                    return
                if span.left:
                    raise SourceUnavailable(f"{self._uri}: the server broke off at byte {span.at}")
            except (Changed, NotRanged):
                raise
            except SourceUnavailable as error:
                if not self._piece.ranged:
                    raise NotRanged("the server sends whole files alone") from error
                tries = 0 if span.at > before else tries + 1
                if tries >= TRIES:
                    raise SourceUnavailable(
                        f"{error}; tried {tries} times: ask again, it goes on from where it is"
                    ) from error
                pause = min(max(BACKOFF_S * 2**tries, _told_s(error)), max(self._meter.left_s, 0.0))
                with self._wake:
                    self._wake.wait_for(lambda: self._stopped, pause)

    def _keep(self, span: Span, fd: int, chunk: bytes) -> bool:
        """Write the bytes; False if nobody needs more of this span."""
        with span.lock:
            if self._stopped:
                return False
            room = memoryview(chunk)[: span.left]
            while room:
                written = os.pwrite(fd, room, span.at)
                span.at += written
                room = room[written:]
        if span.at > self._meter.most_bytes:
            raise TooLarge(
                f"{self._uri} is more than the {self._meter.most_bytes} bytes that are fetched: raise "
                "LORA_FS_FETCH_MAX_BYTES"
            )
        return span.left > 0

    def _follow(self, hasher: Hasher) -> None:
        try:
            with self.part.path.open("rb", buffering=0) as file:
                while not self._stopped and hasher.at != self._ended_at:
                    data = file.read(min(CHUNK_BYTES, self._spans.whole_up_to() - hasher.at))
                    if data:
                        hasher.update(data)
                        continue
                    with self._wake:
                        self._wake.wait(TICK_S)
        except OSError as error:
            self._fail(no_access(self.part.path, error, "read"))
        with self._wake:
            self._wake.notify_all()

    def _fail(self, error: LoraFsError) -> None:
        with self._wake:
            if self._failure is None:
                self._failure = error
            self._wake.notify_all()
