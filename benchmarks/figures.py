"""How figures are told: with what they were measured on, and with their spread."""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import statistics
import subprocess
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """Parse ``--count 16`` and the like: one option for each default."""
    parser = argparse.ArgumentParser(description=description)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


def heading(title: str) -> None:
    """Print what was measured, on what, at which commit."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    packages = ", ".join(f"{name} {version(name)}" for name in ("lora-fs", "uvicorn", "aiohttp"))
    print(f"\n### {title}\n")
    print(f"{os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}, ", end="")
    print(f"{packages}, commit {commit or 'unknown'}\n", flush=True)


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


def interval(values: Sequence[float], rounds: int = 2000) -> tuple[float, float]:
    """A 95 % interval of the median, by bootstrap."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(rounds))
    return medians[int(rounds * 0.025)], medians[int(rounds * 0.975)]
