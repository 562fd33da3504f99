"""Counts what a process asks of a folder: a layer over ``os``, through which the registry does all its I/O.

One call here is one system call, but for ``listdir``, which is an open, as many getdents64 as the names
need, and a close. Bytes are those of read() and write(), and of names listed.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

BY_PATH = ["open", "listdir", "stat", "lstat", "mkdir", "rmdir", "unlink", "link", "rename", "replace"]
BY_HANDLE = ["read", "write", "fsync", "fstat", "close"]


class Calls:
    """Counts while it is installed. Handles are those that were opened under ``root``."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._handles: set[int] = set()
        self.counts: Counter[str] = Counter()
        self.read_bytes = self.written_bytes = self.names = 0

    def install(self) -> None:
        """Stand before ``os`` for the rest of this process."""
        for name in BY_PATH:
            setattr(os, name, self._by_path(name, getattr(os, name)))
        for name in BY_HANDLE:
            setattr(os, name, self._by_handle(name, getattr(os, name)))

    def total(self) -> dict[str, int]:
        """All counts until now."""
        told = {"read_bytes": self.read_bytes, "written_bytes": self.written_bytes, "names": self.names}
        return {**self.counts, **told}

    def _by_path(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(path: Any = ".", *args: Any, **options: Any) -> Any:
            ours = not isinstance(path, int) and os.fsdecode(path).startswith(self._root)
            if ours:
                self.counts[name] += 1
            found = call(path, *args, **options)
            if ours and name == "open":
                self._handles.add(found)
            if ours and name == "listdir":
                self.names += len(found)
            return found

        return counted

    def _by_handle(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(handle: int, *args: Any) -> Any:
            if handle not in self._handles:
                return call(handle, *args)
            self.counts[name] += 1
            if name == "close":
                self._handles.discard(handle)
            found = call(handle, *args)
            if name == "read":
                self.read_bytes += len(found)
            if name == "write":
                self.written_bytes += found
            return found

        return counted


def per(after: dict[str, int], before: dict[str, int], times: float = 1) -> dict[str, float]:
    """What was added, each of so many times."""
    names = after.keys() | before.keys()
    added = {name: (after.get(name, 0) - before.get(name, 0)) / times for name in sorted(names)}
    return {name: value for name, value in added.items() if value}
