"""The token file: who may do what, one token a line. Never keeps, logs or shows a token.

    # the token               then, in any order, its limits
    4c0f…                     name=operators
    9a1b…                     name=team-a-ci namespaces=team-a verbs=register,unregister,read

Of each token its SHA-256 alone stays in memory. A file that cannot be understood gives no tokens at
all, and the error names the line, not what is in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import SEGMENT

MAX_FILE_BYTES: Final = 1 << 20
_TOKEN = re.compile(r"[!-~]{1,4096}")  # what a header can carry: printable ASCII without spaces


class BadTokenFile(InputError):
    """A line of the token file is none; says which one and why, and never what it holds."""


class Verb(StrEnum):
    """What a token may do in its namespaces."""

    REGISTER = "register"
    UNREGISTER = "unregister"
    READ = "read"  # list, describe and use


@dataclass(frozen=True, slots=True)
class Token:
    """One line. ``namespaces`` None: all. ``name`` stands for it in every message."""

    name: str
    sha256: bytes = field(repr=False)
    namespaces: frozenset[str] | None = None
    verbs: frozenset[Verb] = frozenset(Verb)

    def may(self, verb: Verb, namespace: str) -> bool:
        """Whether it is good for ``verb`` in ``namespace``."""
        return verb in self.verbs and (self.namespaces is None or namespace in self.namespaces)


class TokenFile:
    """Reads the file at ``path`` each time, and parses it only if its bytes changed. Blocking."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: tuple[bytes, Mapping[bytes, Token]] = b"", {}

    def read(self) -> Mapping[bytes, Token]:
        """Return each token by its SHA-256.

        Raises:
            OSError: it cannot be read. UnicodeDecodeError: it is no text. BadTokenFile: see ``parse``.
        """
        data = _contents(self.path)
        digest, tokens = hashlib.sha256(data).digest(), self._last[1]
        if digest != self._last[0]:
            tokens = parse(data.decode())
            self._last = digest, tokens
        return tokens


def parse(text: str) -> Mapping[bytes, Token]:
    """Read a token file: each token by its SHA-256. Skips empty lines and comments (``#``).

    Raises:
        BadTokenFile: a line is no token with its limits, or repeats one.
    """
    found: dict[bytes, Token] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        token = _token(number, words)
        known = found.setdefault(token.sha256, token)
        if known is not token:
            raise BadTokenFile(f"line {number} repeats a token: each may stand there once")
    return found


def find(tokens: Mapping[bytes, Token], given: str) -> Token | None:
    """Return the caller's token.

    The look-up is by its SHA-256. The time depends on the hash, which nobody can choose, and not on the
    number of tokens.
    """
    return tokens.get(digest_of(given))


def digest_of(given: str) -> bytes:
    """The SHA-256 of what a header carried."""
    return hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()


def _contents(path: Path) -> bytes:
    """Opened without waiting, so that a FIFO in its place costs no thread. A Secret's file is a link."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError("it is not a regular file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(handle)
    if len(data) > MAX_FILE_BYTES:
        raise OSError(f"it has more than {MAX_FILE_BYTES} bytes")
    return data


def _token(number: int, words: list[str]) -> Token:
    if not _TOKEN.fullmatch(words[0]):
        raise BadTokenFile(
            f"line {number}: a token is 1 to 4096 characters of printable ASCII without spaces"
        )
    said: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in ("name", "namespaces", "verbs") or key in said or not value:
            raise BadTokenFile(
                f"line {number}: after the token may stand name=NAME, namespaces=A,B and verbs=A,B, each once"
            )
        said[key] = value
    name = said.get("name", f"line-{number}")
    if not SEGMENT.fullmatch(name):
        raise BadTokenFile(f"line {number}: a name has 1 to 128 of A-Z a-z 0-9 . _ -")
    namespaces = _namespaces(number, said)
    return Token(name, digest_of(words[0]), namespaces, _verbs(number, said))


def _namespaces(number: int, said: Mapping[str, str]) -> frozenset[str] | None:
    if "namespaces" not in said:
        return None
    named = said["namespaces"].split(",")
    if not all(SEGMENT.fullmatch(one) for one in named):
        raise BadTokenFile(f"line {number}: namespaces= takes namespaces, with commas and without spaces")
    return frozenset(named)


def _verbs(number: int, said: Mapping[str, str]) -> frozenset[Verb]:
    if "verbs" not in said:
        return frozenset(Verb)
    try:
        return frozenset(Verb(one) for one in said["verbs"].split(","))
    except ValueError:
        known = ", ".join(verb.value for verb in Verb)
        raise BadTokenFile(f"line {number}: verbs= takes {known}, with commas and without spaces") from None
