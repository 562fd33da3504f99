"""The file in which one fetch collects a piece, and the note beside it of what has arrived.

Its name has a token of that fetch, so no two fetches write to one path. Two may run at once: a lease does not
stop a process that stood still and wakes. The later one renames the file that it finds to a name of its own.
The earlier one then finds no file under its name, and ends. It may still write through an open descriptor:
the bytes of a range are the same whoever writes them, and a file that begins anew is another inode.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.sources.offer import Piece
from lora_fs.sidecar.sources.receive.spans import notes, read_notes


def no_access(path: Path, error: OSError, to: str = "write") -> VolumeUnavailable:
    """What a fetch says that could not read or write ``path``."""
    if isinstance(error, FileNotFoundError):
        return VolumeUnavailable(f"{path} is gone: another process took this fetch over; try again")
    return VolumeUnavailable(f"cannot {to} {path}: {os.strerror(error.errno or 0)}")


class Part:
    """Of one piece, in ``folder``, by one fetch. Every method raises OSError, if not said otherwise."""

    def __init__(self, piece: Piece, folder: Path) -> None:
        self._piece, self._folder = piece, folder
        self.path = folder / f"{piece.name}.{secrets.token_hex(8)}.part"

    def begin(self) -> list[tuple[int, int]]:
        """Take over the file of an earlier fetch, or create one; returns the ranges that have arrived."""
        arrived: list[tuple[int, int]] = []
        for left in self._left():
            if self._piece.ranged and not arrived:
                arrived = self._take_over(left)
            left.unlink(missing_ok=True)
            _note_of(left).unlink(missing_ok=True)
        if not arrived:
            self.path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            os.close(os.open(self.path, flags, 0o644))
        return arrived

    def _left(self) -> list[Path]:
        """The files of earlier fetches, the latest first."""
        own = re.compile(re.escape(self._piece.name) + r"\.[0-9a-f]{16}\.part")
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if own.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, Path(entry.path)))
        return [path for _, path in sorted(found, reverse=True)]

    def _take_over(self, left: Path) -> list[tuple[int, int]]:
        """Rename it; returns the noted ranges, none unless the note is reliable."""
        try:
            left.rename(self.path)
            note = _note_of(left).read_text()
            _note_of(left).rename(_note_of(self.path))
        except (FileNotFoundError, UnicodeDecodeError):  # its fetch placed it just now, or noted nothing
            return []
        return read_notes(note, self._piece.size_bytes or 0, self.path.stat().st_size)

    def note(self, arrived: Sequence[tuple[int, int]]) -> None:
        """Write down what is on the disk for certain."""
        if not self._piece.ranged or self._piece.size_bytes is None:
            return
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        draft = _note_of(self.path).with_suffix(".tmp")
        draft.write_text(notes(self._piece.size_bytes, arrived))
        draft.replace(_note_of(self.path))
        with suppress(OSError):
            os.utime(self._folder)  # gc goes by it

    def place(self, target: Path) -> None:
        """Give it its name, to survive a power loss."""
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        self.path.replace(target)
        _note_of(self.path).unlink(missing_ok=True)

    def forget(self) -> None:
        """Discard the bytes so far: they are of no use."""
        self.path.unlink(missing_ok=True)
        _note_of(self.path).unlink(missing_ok=True)


def _note_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
