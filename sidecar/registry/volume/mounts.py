"""Finds the filesystem type of a path, and the waits and the way to read that follow from it.

Measured (docs/format.md): local filesystems notify and list at once; network and FUSE
filesystems deliver no inotify events from other hosts and cache for seconds.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "zfs", "f2fs"})
DIRECT = getattr(os, "O_DIRECT", 0)  # Linux's
SLOW_LISTING = ("nfs", "fuse", "cifs", "smb", "9p", "ceph", "lustre")


@dataclass(frozen=True, slots=True)
class Timing:
    """Waits, in seconds.

    Attributes:
        poll_s: between two reads of HEAD.
        settle_s: how long a dropped folder must not change before its adoption.
        lag_s: after a change of HEAD, for which a listing may still lack the new name.
    """

    poll_s: float
    settle_s: float
    lag_s: float


def kind_of(path: Path) -> str:
    """Return the type of the mount that holds ``path``, as /proc/self/mountinfo names it."""
    return mount_of(path)[1]


def mount_of(path: Path) -> tuple[str, str]:
    """Return where the mount that holds ``path`` is, and its type; ``("", "unknown")`` if nobody can say."""
    best = ("", "unknown")
    try:
        found = _mounts_of(os.stat(path).st_dev)
    except OSError:
        return best
    real = os.path.realpath(path)
    for escaped, kind in found:
        mount_point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), escaped)
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best[0]):
            best = (mount_point, kind)
    return best


def timing_for(kind: str) -> Timing:
    """Return short waits for local filesystems, and long ones where listings are stale."""
    if kind in LOCAL:
        return Timing(poll_s=0.1, settle_s=2.0, lag_s=0.0)
    return Timing(poll_s=1.0, settle_s=30.0 if kind.startswith(SLOW_LISTING) else 10.0, lag_s=60.0)


class Delegations:
    """How to open files so that no server delegates one to this host.

    Linux's NFS 4 server delegates a file to a host that reads it. Until that host gave the file back, nobody
    may replace, link or remove it: they wait for 90 s and more if the host is lost. A direct read asks for no
    delegation (NFS 4.1 and later), and finds what the server has.

    What is learned of a folder's first file holds below the folder, so no call is made to know it. That file
    is the marker, which nobody replaces. For a gateway it is a report, which its replica soon replaces.
    """

    def __init__(self) -> None:
        self.free = set[int]()  # devices that delegate nothing
        self._folders = set[str]()  # of files that were found on one that does

    def flag(self, path: str) -> int:
        """Return what ``open`` needs for a file besides; 0 if no folder above it is known to need it."""
        while self._folders and path:
            path = path.rpartition("/")[0]
            if path in self._folders:
                return DIRECT
        return 0

    def learn(self, path: str, device: int) -> None:
        """Learn on which device a file was found. If the mounts cannot be read, learn nothing."""
        try:
            kinds = {kind for _, kind in _mounts_of(device)}
        except OSError:
            return
        if "nfs4" in kinds:
            self._folders.add(path.rpartition("/")[0])
        else:
            self.free.add(device)

    def forget(self) -> None:
        """Forget all: another filesystem is mounted somewhere."""
        self.free.clear()
        self._folders.clear()


def _mounts_of(device: int) -> list[tuple[str, str]]:
    """Where a device is mounted, as the kernel escapes it, and the type of each mount. Raises OSError."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape")
    lines = (line.split(" ") for line in mounts.split("\n"))
    mounted = (one for one in lines if len(one) > 6 and one[2] == wanted and "-" in one)
    return [(one[4], one[one.index("-") + 1]) for one in mounted]


def is_read_only(path: Path) -> bool:
    """Whether the mount that holds ``path`` takes no writes; False if it does not say."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False
