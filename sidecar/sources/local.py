"""A folder on this machine: a path, ``file://`` or ``pvc://``. Refuses anything else, and says what it is.

``pvc://claim/path`` is a folder of a volume that this machine mounts, where LORA_FS_PVC_MOUNTS says;
``pvc:///path`` one of the registry's own volume.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lora_fs.sidecar.errors import InputError, NotFound
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.uri import redacted

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


def resolve(source: str, mounts: Mapping[str, Path] | None = None) -> Path:
    """The folder a SOURCE names, links followed.

    Args:
        mounts: see ``path_of``.
    Raises:
        NotFound: nothing is there. InputError: it is no folder, or does not answer.
    """
    path, told = path_of(source, mounts), shown(redacted(source))
    try:
        mode = path.stat().st_mode
        folder = path.resolve()
    except (FileNotFoundError, NotADirectoryError) as error:
        with suppress(OSError):  # it is no link, or none any more
            leads_to = shown(os.readlink(path))
            raise NotFound(f"{told} is a link to {leads_to}, which is not there") from error
        raise NotFound(
            f"{told}: no such folder on this machine (looked in {shown(str(Path.cwd()))})"
            if not path.is_absolute()
            else f"{told}: no such folder on this machine"
        ) from error
    except PermissionError as error:
        raise InputError(f"{told}: this user may not look there: check owner and mode") from error
    except OSError as error:
        what = "is a link to itself" if error.errno == errno.ELOOP else os.strerror(error.errno or 0)
        raise InputError(f"{told}: {what}: give the folder that holds the adapter") from error
    if not stat.S_ISDIR(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "no folder")
        raise InputError(f"{told} is {kind}: give the folder that holds adapter_config.json and the weights")
    return folder


def path_of(source: str, mounts: Mapping[str, Path] | None = None) -> Path:
    """The path a SOURCE names, not looked at.

    Args:
        mounts: the mount point of each claim of ``pvc://``; ``""`` is the registry's volume.
    Raises:
        InputError: it names none.
    """
    if not source:
        raise InputError("the folder's path is empty: give the folder that holds the adapter")
    if "\0" in source:
        raise InputError("the folder's path holds a NUL byte")
    if "://" not in source:
        return Path(source)
    told = shown(redacted(source))
    try:
        url = urlsplit(source)
    except ValueError as error:
        raise InputError(f"{told} is no URL: write file:///path, or the path alone") from error
    if url.scheme == "pvc":
        return _in_claim(told, url.netloc, unquote(url.path), mounts or {})
    if url.scheme != "file":
        raise InputError(f"{told} names no folder here: give the folder that holds the adapter")
    if url.netloc not in ("", "localhost"):
        host = told.removeprefix("file://").partition("/")[0]
        raise InputError(f"{told} names host {host}: write file:///path for this one")
    path = unquote(url.path)
    if "\0" in path:
        raise InputError("the folder's path holds a NUL byte")
    return Path(path)


def _in_claim(told: str, claim: str, path: str, mounts: Mapping[str, Path]) -> Path:
    if claim not in mounts:
        known = ", ".join(sorted(filter(None, mounts))) or "none"
        raise InputError(
            f"{told}: that claim is not known here ({known}): say where it is mounted in "
            "LORA_FS_PVC_MOUNTS, as claim=/path"
        )
    inside = path.strip("/").split("/")
    if "\0" in path or {"", ".", ".."} & set(inside):
        raise InputError(f"{told}: write the folder's path in the volume, without . and ..")
    return mounts[claim].joinpath(*inside)
