"""How figures are told: with what they were measured on, and with their spread."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def arguments(description: str, **defaults: int | float | str | bool) -> argparse.Namespace:
    """Parse ``--count 16`` and the like: one option for each default, a flag where that is False."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=type(default), default=default)
    return parser.parse_args()


def commit() -> str:
    """The commit that this file is of, and whether anything was changed since; a kit says it in a file."""
    here = Path(__file__).parent
    if (here / "COMMIT").exists():
        return (here / "COMMIT").read_text(encoding="utf-8").strip()
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


def versions(*packages: str) -> dict[str, str]:
    """The versions of those that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def origin(*packages: str) -> dict[str, Any]:
    """What figures were measured on: the machine, versions of packages, the commit."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "linux": platform.release(),
        "python": platform.python_version(),
        "packages": versions("lora-fs", *packages),
        "commit": commit(),
    }


def write_json(path: Path, results: dict[str, Any]) -> None:
    """Replace a file of results at once, so that a run that is cut off leaves the last whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    draft.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def heading(title: str, of: Sequence[str] = ("lora-fs", "uvicorn", "aiohttp")) -> None:
    """Print what was measured, on what, at which commit."""
    packages = ", ".join(f"{name} {one}" for name, one in versions(*of).items())
    print(f"\n### {title}\n")
    print(f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, ", end="")
    print(f"{packages}, commit {commit()}\n", flush=True)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def table(rows: Sequence[tuple[str, Sequence[float]]], unit: str) -> None:
    """Print one row a sample: how many, the median, the 99th percentile, the worst."""
    print(f"| what | n | median {unit} | p99 {unit} | max {unit} |\n|---|---|---|---|---|")
    for what, values in rows:
        numbers = (statistics.median(values), percentile(values, 99), max(values))
        print(f"| {what} | {len(values)} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |")
    print(flush=True)


def interval(
    values: Sequence[Any],
    rounds: int = 2000,
    of: Callable[[Sequence[Any]], float] = statistics.median,
) -> tuple[float, float]:
    """A 95 % interval of what ``of`` makes of the values, by bootstrap."""
    found = sorted(of(random.choices(values, k=len(values))) for _ in range(rounds))
    return found[int(rounds * 0.025)], found[int(rounds * 0.975)]
