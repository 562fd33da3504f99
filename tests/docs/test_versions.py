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
    """Those that ``compat`` has as tested, and no other; each with a list of what it pins."""
    assert tuple(RESULTS) == TESTED
    assert tuple(script().versions()) == TESTED


def test_the_plugin_passes_on_each() -> None:
    """What a version cannot do is left out with the reason; nothing fails."""
    for version, suites in RESULTS.items():
        assert suites["plugin"]["passed"] > 500, version
        assert [suite["failed"] for suite in suites.values() if suite["failed"]] == [], version


def test_the_page_has_them() -> None:
    """`make test-versions` writes both."""
    made = script()
    page = made.PAGE.read_text()
    _, _, rest = page.partition(made.BEGIN)
    assert rest.partition(made.END)[0] == made.table(RESULTS)
