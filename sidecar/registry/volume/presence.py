"""Whether a file is on the server, whatever this client's cache says.

GlusterFS, NFS and sshfs answer ``open`` and ``stat`` from a cache for seconds after another client removed
the file. ``link()`` reaches the server, and fails where the file is gone.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path

from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.volume.atomic import read_bytes

GONE = frozenset({errno.ENOENT, errno.ESTALE})


def is_there(path: Path) -> bool:
    """Return whether a regular file has the name, by a hard link to it that is removed at once.

    Raises:
        VolumeUnavailable: it cannot be known.
    """
    probe = path.parent / f"{TEMPORARY}{secrets.token_hex(16)}"
    try:
        os.link(path, probe, follow_symlinks=False)
    except OSError as error:
        return error.errno not in GONE and read_bytes(path) is not None
    with suppress(OSError):  # gc removes a temporary name that stays
        probe.unlink()
    return True
