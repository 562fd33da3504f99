"""A folder on this machine: a path, or ``file://``."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from lora_fs.sidecar.errors import InputError, NotFound


def resolve(source: str) -> Path:
    """The folder a SOURCE names.

    Raises:
        NotFound: no such folder. InputError: another scheme.
    """
    if "\0" in source:
        raise InputError("SOURCE holds a NUL byte")
    scheme = urlsplit(source).scheme if "://" in source else ""
    if scheme not in ("", "file"):
        raise InputError(f"{scheme}:// is not supported yet: download it and give the folder")
    path = Path(unquote(urlsplit(source).path) if scheme else source)
    if not path.is_dir():
        raise NotFound(f"{source}: no such folder")
    return path.resolve()
