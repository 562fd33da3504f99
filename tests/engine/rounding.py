"""How near the logprobs of two programs have to be that compute in float32."""

from __future__ import annotations

from typing import Any

import pytest

NEAR = 2e-5
# A logprob is the difference of two logits, which may be far larger than it: its rounding goes by theirs.
ROUNDING = 1e-6


def near(logprobs: list[float]) -> Any:
    """Equal to ``logprobs`` but for float32's rounding, at the largest of them."""
    return pytest.approx(logprobs, rel=0, abs=max(NEAR, ROUNDING * max(map(abs, logprobs))))
