"""What Triton's kernels compute, in a process where Triton interprets: it decides that at its import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_in_the_interpreter() -> None:
    """A compiled model's operations; and vLLM's stacks: one launch fills a slot from one block."""
    tests = (HERE / "opaque_interpreted.py", f"{HERE / 'test_stacks.py'}::test_a_slot_is_as_vllm_fills_it")
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *map(str, tests)],
        cwd=HERE.parents[1],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-6000:] + answer.stderr[-2000:]
