"""The passwords of the netrc file, each for the host that its entry names.

An entry that names no host (``default``) gives its password to none: whoever names a source, or a server
that redirects, would choose who gets it.
"""

from __future__ import annotations

import netrc
import re
from pathlib import Path

from lora_fs.sidecar.errors import InputError


def of_netrc(place: str, path: Path | None) -> str | None:
    """Return ``user:password`` for a host, with its port or without; None if no entry names the host.

    Raises:
        InputError: the file cannot be read.
    """
    if path is None:
        return None
    host = re.sub(r":\d+$", "", place).strip("[]")  # the colons of an IPv6 address are in brackets
    try:
        known = netrc.netrc(path).hosts.get(host) if host != "default" else None
    except (OSError, ValueError, netrc.NetrcParseError) as error:
        raise InputError(f"the netrc file {path} cannot be read") from error
    return f"{known[0]}:{known[2]}" if known else None
