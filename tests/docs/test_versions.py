"""The table of vLLM's versions is what the suites answered, and has every one that is served in."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from lora_fs.sidecar.validate.since import SINCE
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


def passed(version: str, suite: str) -> int:
    """How many of a suite's tests."""
    found: int = sum(of["passed"] for of in RESULTS[version][suite].values())
    return found


def test_every_version_is_in_the_results() -> None:
    """Those that ``compat`` has as tested, and older ones for the sidecar; each with its list."""
    assert tuple(script().versions(plugin=True)) == TESTED
    assert list(RESULTS) == script().versions()


def test_the_sidecar_passes_on_each() -> None:
    """Over HTTP alone, on those older than the plugin's, from 0.26 on."""
    older = [version for version in script().versions() if version not in TESTED]
    assert older[0] == "0.26"
    for version in older:
        assert passed(version, "sidecar") > 25, version


def test_what_an_older_engine_is_refused_is_needed() -> None:
    """A row of the sidecar's table goes with the last vLLM that it is for."""
    oldest = Version(script().versions()[0])
    assert [field for field, since in SINCE.items() if since <= oldest] == []


def test_a_fleet_is_upgraded_to_the_newest_and_back() -> None:
    """From 0.31, with sidecars and with the plugin; and a paused engine of it is no broken one."""
    assert passed(TESTED[-1], "fleet") == 6


def test_the_plugin_passes_on_each() -> None:
    """What a version cannot do is left out with the reason; what fails is in the script's list."""
    for version in TESTED:
        assert passed(version, "plugin") > 500, version
    files = [of for suites in RESULTS.values() for suite in suites.values() for of in suite.values()]
    failed = {name for of in files for name in of.get("failed", [])}
    assert failed == script().FAILS.keys(), "a row of FAILS that no version needs goes"


def test_the_page_has_them() -> None:
    """`make test-versions` writes both."""
    made = script()
    page = made.PAGE.read_text()
    _, _, rest = page.partition(made.BEGIN)
    assert rest.partition(made.END)[0] == made.table(RESULTS)
