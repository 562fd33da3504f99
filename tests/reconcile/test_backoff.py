"""When a failed adapter is tried again."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import Mock

import pytest

from lora_fs.sidecar.errors import EngineUnavailable, LoraFsError, RegistryLost, VolumeUnavailable
from lora_fs.sidecar.model import Record
from lora_fs.sidecar.reconcile.residents import backoff
from lora_fs.sidecar.reconcile.residents.backoff import Failure
from tests.reconcile.test_plan import RECORD

ERROR = EngineUnavailable("refused")


def delays(
    count: int, record: Record = RECORD, previous: Failure | None = None, error: LoraFsError = ERROR
) -> list[float]:
    """How long each of so many failures in a row makes the next try wait."""
    found = []
    for _ in range(count):
        previous = backoff.after(previous, record, error, now=1000.0)
        found.append(previous.retry_at - 1000.0)
    return found


@pytest.mark.parametrize("drawn", [0.0, 0.25])
def test_the_delay_doubles_from_a_second_to_five_minutes(
    monkeypatch: pytest.MonkeyPatch, drawn: float
) -> None:
    """Less up to a quarter of it, so that replicas that failed at once do not all come back at once."""
    uniform = Mock(return_value=drawn)
    monkeypatch.setattr(backoff.CHANCE, "uniform", uniform)
    whole = [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert delays(len(whole)) == [(1 - drawn) * delay for delay in whole]
    uniform.assert_called_with(0, 0.25)


@pytest.mark.parametrize("error", [VolumeUnavailable("stale handle"), RegistryLost("is it still mounted?")])
def test_a_volume_that_was_away_is_tried_soon(monkeypatch: pytest.MonkeyPatch, error: LoraFsError) -> None:
    """An hour without it makes no eager adapter wait for five minutes when it is back."""
    monkeypatch.setattr(backoff.CHANCE, "uniform", lambda *_: 0.0)
    assert delays(8, error=error) == [1, 2, 4, 8, 16, 30, 30, 30]


def test_it_draws_nothing_from_the_process_own_chance() -> None:
    """vLLM seeds it where it computes in this process: replicas of one seed would all wait as long."""
    random.seed(0)
    before = random.getstate()
    first = delays(8)
    assert random.getstate() == before
    assert first != delays(8)


def test_the_delay_stays_at_five_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it failed before: over a year, too."""
    monkeypatch.setattr(backoff.CHANCE, "uniform", lambda *_: 0.0)
    often = replace(backoff.after(None, RECORD, ERROR, now=0.0), attempts=100_000)
    assert delays(1, previous=often) == [300]


@pytest.mark.parametrize(
    "other",
    [
        RECORD.model_copy(update={"generation": RECORD.generation + 1}),
        RECORD.model_copy(update={"spec": RECORD.spec.model_copy(update={"digest": "sha256:" + "1" * 64})}),
    ],
    ids=["generation", "digest"],
)
def test_another_record_is_tried_afresh(monkeypatch: pytest.MonkeyPatch, other: Record) -> None:
    """A new generation, or other bytes, may be the remedy: failures of the earlier one do not count."""
    monkeypatch.setattr(backoff.CHANCE, "uniform", lambda *_: 0.0)
    failure = None
    for _ in range(5):
        failure = backoff.after(failure, RECORD, ERROR, now=0.0)
    assert failure is not None
    assert failure.attempts == 5
    assert failure.concerns(RECORD)
    assert not failure.concerns(other)
    assert delays(2, other, failure) == [1, 2]
