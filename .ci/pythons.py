#!/usr/bin/env python3
"""Pythons beside this one that tests/packaging installs the wheel in.

Which are ready is on stdout, which are not on stderr. Each that the machine has gets an environment in
``<environment>/pythons`` with what lora-fs requires, as pinned; lora-fs itself is not in it. Where one cannot
be had, or fetched for, that is said, and the rest is made.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(sys.prefix) / "pythons"
LISTS = [ROOT / "requirements" / name for name in ("engine.txt", "dev.txt")]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# 3.12 is in vLLM's images. 3.10 is refused, and needs no environment. This one is test_wheel.py's.
MINORS = [minor for minor in ("3.11", "3.12", "3.13", "3.14") if minor != HERE]
SUITE = ("hypothesis", "psutil", "pyfakefs", "pytest", "pytest-timeout", "pytest-xdist")  # tests/registry
FETCH_S = 600


def found(minor: str) -> Path | None:
    """An interpreter of that minor: one on PATH, or one of pyenv's."""
    for path in _candidates(minor):
        ask = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        try:
            said = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        except OSError:
            continue
        if said.stdout.strip() == minor:
            return path
    return None


def _candidates(minor: str) -> Iterator[Path]:
    if on_path := shutil.which(f"python{minor}"):
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for folder in sorted(pyenv.glob(f"versions/{minor}.*"), reverse=True):
        yield folder / "bin" / "python"


def environment(minor: str) -> Path:
    """The Python of the environment for that minor, made or not."""
    return FOLDER / minor / "bin" / "python"


def make(minor: str, interpreter: Path) -> str | None:
    """Make its environment, unless it is there; why not, if that cannot be."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    made = "\n".join([*wanted, *(path.read_text() for path in LISTS)])
    folder = FOLDER / minor
    stamp = folder / "made"
    if stamp.exists() and stamp.read_text() == made:
        return None
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", "--without-pip", folder], check=True, timeout=FETCH_S)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    pins = [option for path in LISTS for option in ("--constraint", str(path))]
    command = [*pip, "--python", str(environment(minor)), "install", "--no-compile", *pins, *wanted, *SUITE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except subprocess.TimeoutExpired:
        return f"what lora-fs requires was not fetched within {FETCH_S} s"
    if done.returncode:
        return f"what lora-fs requires cannot be fetched: {done.stderr.strip()[-300:]}"
    stamp.write_text(made)
    return None


def main() -> None:
    """Print the minors that must run."""
    ready = []
    for minor in MINORS:
        interpreter = found(minor)
        why = make(minor, interpreter) if interpreter else "there is none on PATH or in pyenv"
        if why is None:
            ready.append(minor)
        else:
            print(f"pythons: the wheel is NOT TESTED in Python {minor}: {why}", file=sys.stderr)
    print(" ".join(ready))


if __name__ == "__main__":
    main()
