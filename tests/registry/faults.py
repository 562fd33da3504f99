"""Faults put under the registry: a call that fails, fails once done, or is never come back from."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.registry.store.writer import Registry

# The calls by which the registry and the lease touch a volume: those that change it, and all.
CHANGES = "open write fsync link unlink rename replace mkdir rmdir utime ftruncate".split()
CALLS = [*CHANGES, *"read close scandir listdir stat lstat fstat".split()]


def fail(
    patch: pytest.MonkeyPatch,
    call: str,
    code: int,
    *,
    times: int = 1,
    when: Callable[..., bool] = lambda *_, **__: True,
    after: bool = False,
) -> list[tuple[Any, ...]]:
    """Let ``os.<call>`` raise ``code`` the first ``times`` it is called with ``when``; returns its calls.

    Args:
        after: do it first, then raise, as when the reply is lost.
    """
    real, seen = getattr(os, call), Counter[str]()
    calls: list[tuple[Any, ...]] = []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if seen["failed"] < times and when(*args, **kwargs):
            seen["failed"] += 1
            if after:
                real(*args, **kwargs)
            raise OSError(code, os.strerror(code), *map(str, args[:1]))
        return real(*args, **kwargs)

    patch.setattr(os, call, faulty)
    return calls


def copy_instead(source: Path, target: Path) -> None:
    """What link() does on a mount that has no links and says so to nobody: a copy, at one go."""
    with open(source, "rb") as read, open(target, "xb") as written:
        written.write(read.read())


@contextmanager
def before_the_record() -> Iterator[None]:
    """Whatever is registered, or imported, ends when its copy has its place: ENOSPC, at the latest moment."""

    def full(*_: Any, **__: Any) -> NoReturn:
        raise VolumeUnavailable("the volume is full")

    with pytest.MonkeyPatch.context() as patch, suppress(VolumeUnavailable):
        patch.setattr(Registry, "append", full)
        yield


def full_below(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The disk that ``folder`` lies on takes no byte of a file that is opened there from now on."""
    real = Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real(path, mode, *args, **kwargs)
        if path.is_relative_to(folder) and mode != "rb":
            full = os.open("/dev/full", os.O_WRONLY)
            os.dup2(full, file.fileno())
            os.close(full)
        return file

    patch.setattr(Path, "open", opened)


def without_links(patch: pytest.MonkeyPatch) -> None:
    """A volume that refuses link(), as s3fs and gcsfuse do."""
    fail(patch, "link", errno.EPERM, times=1 << 30)
