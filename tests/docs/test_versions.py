"""The table of vLLM's versions is what the suites answered, and has every one that is served in."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from lora_fs.worker_patch.compat import TESTED

ROOT = Path(__file__).parents[2]
RESULTS: dict[str, dict[str, Any]] = json.loads((ROOT / ".ci/versions.json").read_text())


def script() -> Any:
    """``.ci/versions.py``, as a module."""
    spec = importlib.util.spec_from_file_location("versions", ROOT / ".ci/versions.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_version_is_in_the_results() -> None:
    """Those that ``compat`` has as tested, and older ones for the sidecar; each with its list."""
    assert tuple(script().versions(plugin=True)) == TESTED
    assert list(RESULTS) == script().versions()


def test_the_sidecar_passes_on_each() -> None:
    """Over HTTP alone, on those older than the plugin's, from 0.26 on."""
    older = [version for version in script().versions() if version not in TESTED]
    assert older[0] == "0.26"
    for version in older:
        assert RESULTS[version]["sidecar"]["passed"] > 25, version


def test_a_fleet_is_upgraded_to_the_newest_and_back() -> None:
    """From 0.31, with sidecars and with the plugin."""
    assert RESULTS[TESTED[-1]]["fleet"]["passed"] == 4


def test_the_plugin_passes_on_each() -> None:
    """What a version cannot do is left out with the reason; nothing fails."""
    for version in TESTED:
        assert RESULTS[version]["plugin"]["passed"] > 500, version
    for version, suites in RESULTS.items():
        assert [suite["failed"] for suite in suites.values() if suite["failed"]] == [], version


def test_the_page_has_them() -> None:
    """`make test-versions` writes both."""
    made = script()
    page = made.PAGE.read_text()
    _, _, rest = page.partition(made.BEGIN)
    assert rest.partition(made.END)[0] == made.table(RESULTS)
