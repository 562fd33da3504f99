"""A vLLM that the plugin cannot serve in does not start, or serves the base model alone, as was said."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator

import pytest
import vllm
from fastapi import FastAPI
from vllm.lora import worker_manager
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.worker import lora_model_runner_mixin

from lora_fs.worker_patch import compat, plugin
from lora_fs.worker_patch.versions import probes


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was found is kept for a process's life, and not from test to test."""
    monkeypatch.setenv("VLLM_PLUGINS", "lora_fs")
    compat.unfit.cache_clear()
    yield
    compat.unfit.cache_clear()


def check_not_hooked() -> None:
    assert worker_manager.LRUCacheWorkerLoRAManager is LRUCacheWorkerLoRAManager
    assert lora_model_runner_mixin.LRUCacheWorkerLoRAManager is LRUCacheWorkerLoRAManager


def test_this_vllm_is_one_it_was_tested_on() -> None:
    assert compat.fits()
    assert compat.untested() is None


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ("0.29.1", "it is version 0.29.1, and the oldest that is served is 0.30"),
        ("0.3.2", "it is version 0.3.2"),
        ("0.1.dev17160+g1a2b3c4d5", "it is version 0.1.dev17160"),
        ("dev", "its version, 'dev', is none"),
        ("", "its version, '', is none"),
    ],
)
def test_an_older_one_does_not_start(version: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor one that does not say which it is. The one line says why, and what to do."""
    monkeypatch.setattr(vllm, "__version__", version)
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    told = str(ended.value)
    assert says in told
    assert "Use vLLM 0.30, 0.31, 0.32, 0.33; or set LORA_FS_UNFIT=serve-base" in told
    assert "\n" not in told
    check_not_hooked()


def test_a_setting_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server does not start, and one line names the variable."""
    monkeypatch.setenv("LORA_FS_HOST_BYTES", "4Qi")
    with pytest.raises(SystemExit) as ended:
        plugin.register()
    told = str(ended.value)
    assert told.startswith("lora-fs: the server does not start: LORA_FS_HOST_BYTES=")
    assert "\n" not in told
    check_not_hooked()


@pytest.mark.parametrize("version", ["0.34.0", "0.320.0", "1.0.0rc1", "0.99.1+cu130"])
def test_a_newer_one_starts_and_is_told(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all that is relied upon is there, and every probe holds."""
    monkeypatch.setattr(vllm, "__version__", version)
    assert compat.fits()
    assert compat.untested() == (
        f"VllmUntested: this is vLLM {version}, and lora-fs was tested on 0.30, 0.31, 0.32, 0.33"
    )


@pytest.mark.parametrize("version", ["0.32.0", "0.34.0"])
def test_one_that_does_otherwise_does_not_start(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a tested version, or a newer one: what the probe found is in the line."""
    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(probes, "PROBES", (lambda: "it answers backwards",))
    with pytest.raises(SystemExit, match="and it answers backwards"):
        plugin.register()
    with pytest.raises(SystemExit, match="and it answers backwards"):
        plugin.endpoint_plugin()
    check_not_hooked()


def test_a_front_end_that_loads_no_plugin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every adapter would be 404: the server does not start, or warns where serve-base is set."""
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(SystemExit, match="unset VLLM_USE_RUST_FRONTEND, or serve with a sidecar"):
        plugin.register()
    monkeypatch.setenv("LORA_FS_UNFIT", "serve-base")
    plugin.register()
    assert "NO ADAPTERS" in caplog.records[-1].getMessage()
    check_not_hooked()


def test_a_function_that_takes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_adapter(self: object, lora_request: object, extra: int) -> bool:
        return True

    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "add_adapter", add_adapter)
    assert "extra" in str(compat.unfit())


@pytest.mark.parametrize("named", [None, "", "lora_filesystem_resolver"])
def test_nothing_is_hooked_unless_it_was_named(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor refused: lora-fs may be there for its commands."""
    monkeypatch.setattr(vllm, "__version__", "0.1.0")
    monkeypatch.delenv("VLLM_PLUGINS")
    if named is not None:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    plugin.register()
    check_not_hooked()


def test_the_base_model_alone_where_that_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is hooked, no route is added, and the last word is that no adapters are served."""
    monkeypatch.setattr(vllm, "__version__", "0.29.0")
    monkeypatch.setenv("LORA_FS_UNFIT", "serve-base")
    plugin.register()
    app = FastAPI()
    before = list(app.routes)
    endpoint = plugin.endpoint_plugin()
    with caplog.at_level(logging.INFO):
        logging.getLogger("vllm").info("Loaded endpoint plugin lora_fs")
        endpoint.attach_router(app)
    assert list(app.routes) == before
    assert "NO ADAPTERS" in caplog.records[-1].getMessage()
    assert "it is version 0.29.0" in caplog.records[-1].getMessage()
    check_not_hooked()


def test_what_cannot_be_imported_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs an exception of a plugin's, and serves without it."""
    monkeypatch.setitem(importlib.sys.modules, "lora_fs.worker_patch.api.endpoint", None)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit, match=r"lora_fs\.worker_patch\.api\.endpoint"):
        plugin.endpoint_plugin()
