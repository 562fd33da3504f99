#!/usr/bin/env python3
"""The Chromium that tests/dashboard draws the dashboard in: its program on stdout, the reason on stderr.

The machine's own is taken; else Debian's is fetched with its own client into ``<environment>/chromium``
and unpacked there; nothing is installed. A machine without Debian, or without its mirror, has none. The
libraries and fonts beside the program are named by the script that starts it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from filesystems import apt

FOLDER = Path(sys.prefix) / "chromium"
START = FOLDER / "start"
PACKAGES = ["chromium", "fonts-liberation"]
NAMES = ["chromium", "chromium-browser", "google-chrome-stable", "google-chrome"]
SCRIPT = """#!/bin/sh
here={folder}
libraries="$here/usr/lib/{triplet}:$here/lib/{triplet}"
export LD_LIBRARY_PATH="$libraries:$here/usr/lib/{triplet}/pulseaudio:$here/usr/lib/chromium"
export XDG_DATA_DIRS="$here/usr/share:/usr/local/share:/usr/share"
[ -d /etc/fonts ] || export FONTCONFIG_PATH="$here/etc/fonts"
exec "$here/usr/lib/chromium/chromium" "$@"
"""


def found() -> str | None:
    """The program, if there is one."""
    if START.exists():
        return str(START)
    return next((path for path in map(shutil.which, NAMES) if path), None)


def fetch() -> str | None:
    """Fetch and unpack it; why not, if that cannot be."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "no apt-get, dpkg: install chromium by hand"
    with tempfile.TemporaryDirectory(prefix="lora-fs-chromium-") as folder:
        archives = Path(folder)
        (archives / "partial").mkdir()
        done = apt(archives, "install", "--download-only", "--reinstall", *PACKAGES)
        if done.returncode:
            return f"Debian's mirror does not give it: {done.stderr.strip()[-200:]}"
        unpacked = archives / "unpacked"
        for package in sorted(archives.glob("*.deb")):
            subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(unpacked, FOLDER, symlinks=True)
    START.write_text(SCRIPT.format(folder=FOLDER, triplet=sysconfig.get_config_var("MULTIARCH")))
    START.chmod(0o755)
    return None


def main() -> None:
    """Print the program, fetched if it has to be."""
    why = None if found() else fetch()
    program = found()
    if program is None:
        print(f"chromium: the dashboard is NOT TESTED in a browser here: {why}", file=sys.stderr)
        return
    says = subprocess.run(
        [program, "--version", "--no-sandbox"], capture_output=True, text=True, timeout=60, check=False
    )
    if says.returncode:
        raise SystemExit(f"chromium: {program} does not start: {says.stderr.strip()[-500:]}")
    print(program)


if __name__ == "__main__":
    main()
