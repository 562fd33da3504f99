"""Real mounts for the tests: a volume of a fixed size, and one that never answers.

Both need root; what cannot be mounted here is skipped with that reason by who asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2


def may_mount() -> bool:
    """Whether this process may mount at all."""
    return os.geteuid() == 0 and os.access("/dev/fuse", os.W_OK)


@contextlib.contextmanager
def sized(folder: Path, size_mib: int) -> Iterator[None]:
    """A filesystem in memory that holds ``size_mib`` and no more."""
    mount("-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", str(folder))
    try:
        yield
    finally:
        detach(folder)


def mount(*arguments: str) -> None:
    """``mount ARGUMENTS``."""
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def detach(folder: Path) -> None:
    """Take a mount away at once, open files or not."""
    if _LIBC.umount2(os.fsencode(folder), _MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), f"cannot unmount {folder}")


@contextlib.contextmanager
def hanging(folder: Path) -> Iterator[None]:
    """A FUSE mount over ``folder`` that nobody serves: whoever looks into it waits.

    At the end the mount goes, and those who waited get ENOTCONN.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if _LIBC.mount(b"hanging", os.fsencode(folder), b"fuse", 0, options.encode()) != 0:
        os.close(device)
        raise OSError(ctypes.get_errno(), f"cannot mount on {folder}")
    try:
        yield
    finally:
        detach(folder)
        os.close(device)
