"""The gateway's series, and the table that describes them."""

from __future__ import annotations

import re
import time
from pathlib import Path

from lora_fs.sidecar.gateway.discovery import Given
from lora_fs.sidecar.gateway.metrics import Metrics
from lora_fs.sidecar.gateway.routing import Router
from lora_fs.sidecar.gateway.watch import Watch

PAGE = Path(__file__).parents[2] / "docs/howto/fleet.md"
KINDS = {"counter": "_total", "gauge": "", "histogram": ""}


def test_the_table_has_every_series_of_the_gateway_and_no_other() -> None:
    """Each metric stands in the table with its kind and its labels."""
    router = Router(time.monotonic)
    router.report("r0", [], None, 0.0)
    metrics = Metrics(router, Watch(router, Given(()), time.monotonic, headers={}))
    exposed = {
        (family.name + KINDS[family.type], family.type, tuple(sorted(_labels(family.samples[0].labels))))
        for family in metrics.registry.collect()
        if family.name.startswith("lora_fs_gateway")
    }
    rows = re.findall(r"^\| `(lora_fs_gateway_\w+)` \| (\w+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    assert {(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exposed


def _labels(labels: dict[str, str]) -> set[str]:
    return labels.keys() - {"le"}
