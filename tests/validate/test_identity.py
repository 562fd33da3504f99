"""A base model has many names; which of them mean one model."""

from __future__ import annotations

import pytest

from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate.base.identity import ModelName, check_base_model
from lora_fs.sidecar.validate.report import Findings

SAME = [
    ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "qwen/qwen2.5-7b/"),
    ("Qwen/Qwen2.5-7B", "Qwen--Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "/models/Qwen2.5-7B/"),
    ("Qwen/Qwen2.5-7B", "./Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "/models/Qwen--Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "/home/vllm/.cache/hub/models--Qwen--Qwen2.5-7B/snapshots/0a1b2c"),
    ("Qwen/Qwen2.5-7B", "/home/vllm/.cache/hub/models--Qwen--Qwen2.5-7B/snapshots/0a1b2c/"),
    ("/a/llama", "/b/llama"),
    ("llama", "/b/llama"),
]
SURELY_OTHERS = [
    ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"),
    ("Qwen/Qwen2.5-7B", "other/Qwen2.5-7B"),
    ("Qwen/Qwen2.5-7B", "/hub/models--Qwen--Qwen2.5-14B/snapshots/0a1b2c"),
]
PERHAPS_OTHERS = [("Qwen/Qwen2.5-7B", "chat"), ("/a/llama", "Qwen/Qwen2.5-7B"), ("x", "y")]


def findings(base_model: str | None, *model_ids: str) -> list[tuple[str, Severity]]:
    found = Findings()
    check_base_model(base_model, model_ids, found)
    return [(finding.code, finding.severity) for finding in found.freeze()]


@pytest.mark.parametrize(("left", "right"), SAME)
def test_names_of_one_model(left: str, right: str) -> None:
    """They are one model whichever side the adapter is on."""
    assert ModelName.parse(left).same_as(ModelName.parse(right))
    assert findings(left, right) == findings(right, left) == []


@pytest.mark.parametrize(("left", "right"), SURELY_OTHERS)
def test_two_hub_ids(left: str, right: str) -> None:
    """Two hub ids that differ are two models: refused."""
    assert findings(left, right) == findings(right, left) == [("base-model", Severity.ERROR)]


@pytest.mark.parametrize(("left", "right"), PERHAPS_OTHERS)
def test_names_that_cannot_tell(left: str, right: str) -> None:
    """A served name or a path may be any model: told, not refused."""
    assert findings(left, right) == findings(right, left) == [("base-model", Severity.WARNING)]


def test_any_name_of_the_engine_will_do() -> None:
    """One of the names the engine's model goes by is enough."""
    assert findings("Qwen/Qwen2.5-7B", "chat", "acme/other", "/models/Qwen2.5-7B") == []


def test_nothing_to_compare() -> None:
    """Without a name on one side there is no mismatch; a config without one is told."""
    assert findings("Qwen/Qwen2.5-7B") == []
    assert findings(None, "chat") == [("base-model-missing", Severity.WARNING)]


@pytest.mark.timeout(10)
@pytest.mark.parametrize("text", ["models--" * 128, "a--" * 340, "/" * 1024, "-" * 1024])
def test_hostile_names(text: str) -> None:
    """Names made to slow a pattern down are taken apart at once."""
    ModelName.parse(text)
