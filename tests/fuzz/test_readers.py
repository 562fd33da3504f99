"""Whatever bytes lie in a file, its reader answers in time with what it declares.

Two engines for one table of readers. Hypothesis edits good inputs in ways that keep their form, the
same ones in every run. atheris follows coverage for minutes a reader: `make torture`. What either
finds is kept in ``corpus/<reader>/`` and read by every run.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutations import edits, mutate
from tests.fuzz.readers import HERE, READERS

EXAMPLES = 400
EXAMPLES_LONG = 20_000
ONE_INPUT_S = 2.0
GUIDED_S = 360
CORPUS = sorted((HERE / "corpus").glob("*/*"))


class Hang(BaseException):
    """An input took longer than any may; no reader catches it."""


@contextmanager
def bounded() -> Iterator[None]:
    """Interrupt the block after ONE_INPUT_S of the process's own time: a busy machine is no hang."""

    def end(number: int, frame: FrameType | None) -> None:
        raise Hang(f"took longer than {ONE_INPUT_S} s")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, ONE_INPUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(name: str, examples: int) -> None:
    reader = READERS[name]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(seed=st.integers(0, len(reader.seeds) - 1), changes=edits(reader.words))
    def each(seed: int, changes: list[tuple[str, int, object]]) -> None:
        with bounded():
            reader.run(mutate(reader.seeds[seed], changes))

    each()


@pytest.mark.parametrize("name", READERS)
def test_good_input_is_read(name: str) -> None:
    """The inputs that all others are made from are read to their end."""
    for data in READERS[name].seeds:
        READERS[name].read(data)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_was_found_once(path: Path) -> None:
    """Inputs that once raised, hung or told too much."""
    with bounded():
        READERS[path.parent.name].run(path.read_bytes())


@pytest.mark.parametrize("name", READERS)
def test_edited_input(name: str) -> None:
    """Good input with a few edits, the same in every run."""
    fuzz(name, EXAMPLES)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_edited_input_for_long(name: str) -> None:
    """Many more of them."""
    fuzz(name, EXAMPLES_LONG)


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_guided_by_coverage(name: str, tmp_path: Path) -> None:
    """Six minutes of libFuzzer a reader find nothing; what they find lies in the message's folder."""
    pytest.importorskip("atheris", reason="atheris has no wheel for this Python: edits alone are tried")
    # libFuzzer bounds the largest size that the process ever had, and an exec keeps its parent's: it gets a
    # parent that is small.
    ran = subprocess.run(
        [
            *("setsid", "--fork", "--wait"),
            *(sys.executable, str(HERE / "guided.py"), name, str(GUIDED_S), str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GUIDED_S + 120,
    )
    assert ran.returncode == 0, f"{name}: see {tmp_path}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    executed = re.search(r"number_of_executed_units: (\d+)", ran.stderr)
    print(f"{name}: {executed[1] if executed else '?'} inputs in {GUIDED_S} s")
