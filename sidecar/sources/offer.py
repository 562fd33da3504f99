"""What every source does: look, and say which files there are and how to read them.

A package adds a scheme by the entry-point group ``lora_fs.sources``: its name is the scheme, its
object takes the ``Uri`` and the ``Options``, and returns a ``Source``. A source reads bytes and
nothing else. Bounds, resuming, parallel reads, hashing and placing are ``transfer``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Protocol

from lora_fs.sidecar.errors import InputError, LoraFsError, SourceUnavailable, TooLarge
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.uri import Uri
from lora_fs.sidecar.trust import BUNDLE
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.folder import PICKLES, WEIGHTS_FILE

CARRIED = ("metadata.json", "README.md", BUNDLE)
MAX_CARRIED_BYTES = 1 << 20
ARCHIVE = ".archive"  # begins the name of a piece to unpack
MOST_RETRY_S = 3600.0  # of what a server says; who passes it on says no more either
_OF_URL = "url:"

Read = Callable[[int, int | None], AbstractContextManager[Iterator[bytes]]]


class Changed(SourceUnavailable):
    """The file changed since the look at it: its bytes so far are of no use."""

    spoiled = True


class NotRanged(SourceUnavailable):
    """The server sends whole files alone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One file of an offer.

    Attributes:
        name: in the adapter's folder; a piece whose name begins with ARCHIVE is unpacked into it.
        size_bytes: None if the server does not say it; a negative one means that, too.
        read: opens ``[start, end)``, to the end where that is None; raises SourceUnavailable when it
            breaks off, Changed, NotRanged.
        ranged: whether the server sends a part of it.
        sha256, git_oid: the hashes that its bytes must have; None: unknown.
    """

    name: str
    size_bytes: int | None
    read: Read = field(repr=False)
    ranged: bool = True
    sha256: str | None = None
    git_oid: str | None = None

    @property
    def packed(self) -> bool:
        """Whether it is a tar to unpack."""
        return self.name.startswith(ARCHIVE)

    def __post_init__(self) -> None:
        if self.size_bytes is not None and self.size_bytes < 0:
            object.__setattr__(self, "size_bytes", None)
            object.__setattr__(self, "ranged", False)


@dataclass(frozen=True, slots=True)
class Offer:
    """The current contents of a source.

    Attributes:
        pin: its commit, etag or hash: the same URI and pin are the same bytes. None: unknown.
        mark: tells the source from others that print as the same URI; empty if none do.
    """

    uri: str
    pin: str | None
    pieces: tuple[Piece, ...]
    mark: str = ""

    @property
    def size_bytes(self) -> int | None:
        """The size of all pieces; None if one does not say its own."""
        sizes = [piece.size_bytes for piece in self.pieces]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def recorded(self) -> str | None:
        """The pin as a record has it: a mark also if nothing pins the bytes."""
        return self.mark or None if self.pin is None else self.pin

    def marked(self, uri: Uri) -> Offer:
        """The offer of ``uri``, with a pin that tells it from others that print the same.

        The hash of the one file pins its bytes wherever they lie, and stays as it is.
        """
        if not uri.identity or self._by_bytes:
            return self
        mark = _OF_URL + uri.identity
        return replace(self, pin=None if self.pin is None else f"{self.pin} {mark}", mark=mark)

    @property
    def _by_bytes(self) -> bool:
        return len(self.pieces) == 1 and self.pin == f"sha256:{self.pieces[0].sha256}"


def unmarked(pin: str | None) -> str | None:
    """Return what of a recorded pin pins the bytes; None: nothing does."""
    words = (pin or "").split(" ")
    return " ".join(words[:-1] if words[-1].startswith(_OF_URL) else words) or None


def is_of(pin: str | None, uri: Uri) -> bool:
    """Whether what a record pins so may have come from ``uri``, in the form that the record prints."""
    words = (pin or "").split(" ")
    hashes = [word for word in words if word.startswith("sha256:")]
    if uri.sha256 and hashes and f"sha256:{uri.sha256}" not in hashes:
        return False
    if uri.sha256 and words == hashes:
        return True
    mark = words[-1] if words[-1].startswith(_OF_URL) else ""
    return mark == (_OF_URL + uri.identity if uri.identity else "")


class Source(Protocol):
    """Where one adapter comes from."""

    def look(self) -> Offer:
        """Look at the source, without fetching it.

        Raises:
            NotFound, InputError: there is no adapter, or it may not be read.
            SourceUnavailable: it did not answer.
        """

    def close(self) -> None:
        """Let go of what was held; called once."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a source.

    Attributes:
        check: raises InputError for a forbidden URI, such as a redirect may name.
        check_address: raises InputError for a forbidden IP address that a URI's host resolved to. Runs
            before each connection.
        stall_s: how long to wait for a connection, and for its next byte.
        netrc_file: holds the passwords of web servers and registries.
        registry_auth_file: docker's ``config.json`` with the passwords of registries.
        alive: called during waits for an answer; raises SourceUnavailable to end them.
    """

    check: Callable[[Uri], None] = lambda _: None
    check_address: Callable[[Uri, str], None] = lambda _, __: None
    stall_s: float = 30.0
    netrc_file: Path | None = None
    registry_auth_file: Path | None = None
    alive: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Meter:
    """Bounds one fetch and tells how far it is.

    Attributes:
        most_bytes, most_s: what it may take.
        tell: called with the bytes that arrived and the bytes of the whole, None if unknown.
        stop: called now and then; True ends the fetch, and a later one can resume it.
    """

    most_bytes: int
    most_s: float
    tell: Callable[[int, int | None], None] = lambda _, __: None
    stop: Callable[[], bool] = lambda: False
    total: int | None = None
    started: float = field(default_factory=time.monotonic)

    def check_size(self, uri: str, size_bytes: int | None) -> None:
        """Refuse too large a source before it fetches any of it."""
        if size_bytes is not None and size_bytes > self.most_bytes:
            raise TooLarge(
                f"{uri} is {size_bytes} bytes; {self.most_bytes} are the most that is fetched: raise "
                "LORA_FS_FETCH_MAX_BYTES"
            )

    @property
    def left_s(self) -> float:
        """Seconds until the fetch gives up."""
        return self.most_s - (time.monotonic() - self.started)

    def check_time(self, uri: str) -> None:
        """End a fetch that takes too long. The bytes so far stay for the next one."""
        if self.left_s <= 0:
            raise SourceUnavailable(
                f"{uri} was not fetched in {self.most_s:.0f} s: ask again, it goes on from where it is; or "
                "raise LORA_FS_FETCH_TIMEOUT_S"
            )
        if self.stop():
            raise SourceUnavailable(f"{uri}: the fetch was stopped; ask again, it goes on from where it is")


def put_off(error: LoraFsError, told: str | None) -> LoraFsError:
    """The error, with what a ``Retry-After`` says, if that can be read, up to MOST_RETRY_S."""
    if told is None or not isinstance(error, SourceUnavailable):
        return error
    try:
        if told.strip().isdecimal():
            error.retry_after_s = min(float(told), MOST_RETRY_S)
        else:
            at = parsedate_to_datetime(told)
            at = at if at.tzinfo else at.replace(tzinfo=UTC)
            error.retry_after_s = min(max(0.0, (at - datetime.now(UTC)).total_seconds()), MOST_RETRY_S)
    except (ValueError, OverflowError):
        pass  # it is neither
    return error


def is_adapter(names: Collection[str]) -> bool:
    """Whether a folder with these files holds one."""
    return CONFIG_FILE in names and any(name in names for name in (WEIGHTS_FILE, *PICKLES))


def wanted(names: dict[str, int | None], below: Collection[str] = ()) -> list[str]:
    """Which files of a folder an engine reads, and which come along.

    Args:
        names: with their sizes.
        below: folders in it that hold an adapter, to name them where it holds none.
    Raises:
        InputError: there is no adapter among them.
    """
    weights = next((name for name in (WEIGHTS_FILE, *PICKLES) if name in names), None)
    if CONFIG_FILE not in names or weights is None:
        missing = CONFIG_FILE if CONFIG_FILE not in names else WEIGHTS_FILE
        held = ", ".join(map(shown, sorted(names)[:8])) or ("folders alone" if below else "nothing")
        some = ", ".join(map(shown, sorted(below)[:4])) + (" and others" if len(below) > 4 else "")
        more = f"; one lies in each of its folders {some}: write one of them behind it" if below else ""
        raise InputError(f"no adapter lies there: {missing} is missing; it holds {held}{more}")
    small = [name for name in CARRIED if name in names and (names[name] or 0) <= MAX_CARRIED_BYTES]
    return [CONFIG_FILE, weights, *small]
