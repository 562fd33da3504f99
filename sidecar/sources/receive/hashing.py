"""The hashes of a file that is read from its beginning, and whether they are those it has to have."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.offer import Piece

CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Hash:
    """``git_oid``: git's hash; None unless a piece has one to compare with."""

    sha256: str
    git_oid: str | None


class Hasher:
    """Fed a piece's bytes in their order. ``at``: how many it has had."""

    def __init__(self, piece: Piece) -> None:
        self.at = 0
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(usedforsecurity=False) if piece.git_oid else None
        if self._git is not None:
            self._git.update(b"blob %d\0" % (piece.size_bytes or 0))

    def update(self, data: bytes) -> None:
        self._sha256.update(data)
        if self._git is not None:
            self._git.update(data)
        self.at += len(data)

    def done(self) -> Hash:
        return Hash(self._sha256.hexdigest(), self._git.hexdigest() if self._git else None)


def hash_of(path: Path, piece: Piece) -> Hash:
    """Read a file that lies there."""
    hasher = Hasher(piece)
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            hasher.update(data)
    return hasher.done()


def check(piece: Piece, path: Path, uri: str, hashed: Hash) -> str:
    """The file's SHA-256.

    Raises:
        InputError: it is not what the piece has to be.
    """
    size = path.stat().st_size
    if piece.size_bytes is not None and size != piece.size_bytes:
        raise InputError(f"{uri}: {piece.name} has {size} bytes; {piece.size_bytes} were announced")
    wants, has = piece.sha256 or piece.git_oid, hashed.sha256 if piece.sha256 else hashed.git_oid
    if wants is not None and wants != has:
        raise InputError(
            f"{uri}: {piece.name} is not the file it has to be: it has the hash {has}, and {wants} is asked "
            "for; it was damaged on its way, or replaced"
        )
    return hashed.sha256
