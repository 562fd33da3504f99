"""What the workers' answers to a load come to."""

from __future__ import annotations

from typing import Any

import pytest

from lora_fs.worker_patch.api.calls import admission

READY: dict[str, Any] = {"state": "ready"}
LOADING: dict[str, Any] = {"state": "loading", "load": "api 1"}
LOADED: list[dict[str, Any]] = [
    {"state": "loaded", "load": "api 2", "bytes": 10},
    {"state": "loaded", "load": "api 1", "bytes": 9},
]


@pytest.mark.parametrize("others", [[], [READY]], ids=["all have loaded it", "another engine has it already"])
def test_a_share_that_each_worker_has_is_admitted(others: list[dict[str, Any]]) -> None:
    """By the largest share, and by every load that one of them began."""
    assert admission([*others, *LOADED]) == {"loads": ["api 1", "api 2"], "bytes": 10}


@pytest.mark.parametrize("answers", [[*LOADED, LOADING], [READY, READY], []])
def test_nothing_is_admitted_before(answers: list[dict[str, Any]]) -> None:
    assert admission(answers) is None
