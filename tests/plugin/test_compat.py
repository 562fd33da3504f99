"""Another vLLM, or one that nobody named the plugin for, is left as it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import vllm
from vllm.lora import worker_manager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker import lora_model_runner_mixin

from lora_fs.worker_patch import compat, plugin


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found is kept for a process's life, and not from test to test."""
    compat.unfit.cache_clear()
    yield
    compat.unfit.cache_clear()


def test_this_vllm_is_one_it_was_tested_on() -> None:
    assert compat.unfit() is None


def test_another_version_is_refused_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    for _ in range(3):
        assert "0.99.1" in str(compat.unfit())
    assert [record.message.count("leaves this vLLM as it is") for record in caplog.records] == [1]


def test_a_version_that_only_begins_alike_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.320.0")
    assert compat.unfit() is not None


def test_a_function_that_takes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_adapter(self: object, lora_request: object, extra: int) -> bool:
        return True

    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "add_adapter", add_adapter)
    assert "extra" in str(compat.unfit())


@pytest.mark.parametrize("named", [None, "", "lora_filesystem_resolver"])
def test_nothing_is_hooked_unless_it_was_named(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    plugin.register()
    assert worker_manager.LRUCacheWorkerLoRAManager is LRUCacheWorkerLoRAManager
    assert lora_model_runner_mixin.LRUCacheWorkerLoRAManager is LRUCacheWorkerLoRAManager


def test_an_unfit_vllm_gets_an_endpoint_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import FastAPI

    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_fs")
    plugin.register()
    app = FastAPI()
    before = list(app.routes)
    plugin.endpoint_plugin().attach_router(app)
    assert list(app.routes) == before
    assert worker_manager.LRUCacheWorkerLoRAManager is LRUCacheWorkerLoRAManager
