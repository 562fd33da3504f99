#!/usr/bin/env python3
"""The OCI registry that tests/sources pulls from: its program on stdout, the reason on stderr.

The machine's own is taken; else Debian's ``docker-registry`` is fetched as the filesystems' servers are, and
unpacked beside them; nothing is installed. A machine without Debian, or without its mirror, has none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from filesystems import FOLDER, fetch

NAME = "docker-registry"


def found() -> str | None:
    """The program, if there is one."""
    own = FOLDER / "usr" / "bin" / NAME
    return str(own) if own.exists() else shutil.which(NAME)


def main() -> None:
    """Print the program, fetched if it has to be."""
    why = None if found() else fetch([NAME])
    program = found()
    if program is None:
        print(f"oci-registry: oci:// is NOT TESTED against a registry here: {why}", file=sys.stderr)
        return
    print(program)


if __name__ == "__main__":
    main()
