"""One benchmark in turns in two checkouts: what the change costs, on a quiet machine.

    python benchmarks/before_after.py bench_engine_requests.py --before ../before --turns 5 -- --rounds 300

``--before``: a checkout of the commit before, with an environment of its own (`make env` there). Each turn
runs both, in an order that alternates. Of each row of their tables the medians are compared, turn by turn: a
row that is worse by more than ``--percent`` is told, and the exit code is 1. Rows of a stock engine are not
judged. They show what the machine alone does.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
# As ``figures.table`` prints it: what, how many, the median, the 99th percentile, the worst.
ROW = re.compile(r"\| (?P<what>[^|]+) \| \d+ \| (?P<median>\d+\.\d+) \|(?: \d+\.\d+ \|){2}")
STOCK = ": stock"


def medians(printed: str) -> dict[str, float]:
    """The median of each row, by what it is of."""
    found = [ROW.fullmatch(line.strip()) for line in printed.splitlines()]
    return {row["what"].strip(): float(row["median"]) for row in found if row}


def python_of(checkout: Path) -> Path:
    """The Python of a checkout's own environment.

    Raises:
        SystemExit: it has none, or that one runs the code of another checkout.
    """
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{checkout} has no environment: run `make env` there")
    ask = [str(python), "-P", "-c", "import lora_fs.sidecar; print(lora_fs.sidecar.__file__)"]
    where = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    if not Path(where).resolve().is_relative_to(checkout):
        raise SystemExit(f"the environment of {checkout} runs {where}: run `make env` there")
    return python


def run(checkout: Path, script: str, options: Sequence[str]) -> dict[str, float]:
    """One run in one checkout.

    Raises:
        SystemExit: it failed, or printed no table.
    """
    command = [str(python_of(checkout)), "-P", str(checkout / "benchmarks" / script), *options]
    done = subprocess.run(command, cwd=checkout, stdout=subprocess.PIPE, text=True, check=False)
    found = medians(done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{script} in {checkout} exits {done.returncode}:\n{done.stdout}")
    return found


def ratios(turns: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> dict[str, list[float]]:
    """After over before, turn by turn, of each row that both have in every turn."""
    both = [row for row in turns[0][0] if all(row in one for turn in turns for one in turn)]
    return {row: [after[row] / before[row] for before, after in turns] for row in both}


def worse(of: Mapping[str, Sequence[float]], percent: float) -> list[str]:
    """The rows whose median is worse by more than that, those of a stock engine left out."""
    bound = 1 + percent / 100
    return [row for row, each in of.items() if not row.endswith(STOCK) and statistics.median(each) > bound]


def main() -> None:
    """Exit 1 if a row is worse."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", help="its name in benchmarks/")
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--percent", type=float, default=3.0)
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    chosen, options = parser.parse_args(words[:cut]), words[cut + 1 :]
    checkouts = [chosen.before.resolve(), HERE]
    turns = []
    for turn in range(chosen.turns):
        found = {}
        for checkout in checkouts if turn % 2 == 0 else checkouts[::-1]:
            print(f"turn {turn + 1} of {chosen.turns}: {checkout}", file=sys.stderr, flush=True)
            found[checkout] = run(checkout, chosen.script, options)
        turns.append((found[checkouts[0]], found[checkouts[1]]))
    of = ratios(turns)
    if not of:
        raise SystemExit("the two checkouts print no row of the same name")
    print(
        "| what | before ms | after ms | after / before, median | least | most |\n|---|---|---|---|---|---|"
    )
    for row, each in of.items():
        before, after = (statistics.median(turn[side][row] for turn in turns) for side in (0, 1))
        print(f"| {row} | {before:.2f} | {after:.2f} | ", end="")
        print(f"{statistics.median(each):.3f} | {min(each):.3f} | {max(each):.3f} |")
    slower = worse(of, chosen.percent)
    for row in slower:
        print(f"worse by more than {chosen.percent:g} %: {row}")
    sys.exit(bool(slower))


if __name__ == "__main__":
    main()
