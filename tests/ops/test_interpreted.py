"""The Triton kernels, computed by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(1800)  # a suite of its own
def test_kernels_agree_with_the_reference_in_the_interpreter() -> None:
    """All of tests/ops/gpu passes, in a process where Triton interprets.

    Triton decides that at its import, for the whole process; others of this process compile.
    """
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", "tests/ops/gpu"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
