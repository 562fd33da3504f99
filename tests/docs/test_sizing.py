"""The table of docs/howto/sizing.md is what its formula gives."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import ROOT

PAGE = (ROOT / "docs/howto/sizing.md").read_text()
# Llama 3 8B.
HIDDEN, KEYS, INNER, LAYERS = 4096, 1024, 14336, 32
ATTENTION = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS)
SUM = LAYERS * (ATTENTION + 3 * (HIDDEN + INNER))
BYTES = 2  # bfloat16


def test_the_sum_is_the_models() -> None:
    """The page's sum over all seven linear layers is that of the model's shape."""
    assert f"the sum is {SUM:,}" in PAGE
    assert pytest.approx(1 / 3, abs=0.02) == LAYERS * ATTENTION / SUM  # "a third of that"


def test_each_row_follows_from_the_formula() -> None:
    """Rank by rank: one adapter in MB, 100 and 1,000 of them in GB."""
    rows = re.findall(r"^\| (\d+) \| (\d+) MB \| ([\d.]+) GB \| (\d+) GB \|$", PAGE, re.MULTILINE)
    assert [int(rank) for rank, *_ in rows] == [8, 16, 32, 64]
    for rank, *cells in rows:
        one = int(rank) * SUM * BYTES
        expected = (one / 1e6, 100 * one / 1e9, 1000 * one / 1e9)
        assert [float(cell) for cell in cells] == pytest.approx(expected, rel=0.01)
