"""Say whether lora-fs can serve an adapter's folder, and if not: which file, which field, why.

``validate`` answers bad input with findings and never blocks, unpickles or follows a link.
``CODES`` is the table of every finding there is.
"""

from __future__ import annotations

from lora_fs.sidecar.validate.base.base_config import BaseOfEngine, expect, load_base_config
from lora_fs.sidecar.validate.base.modules import compared
from lora_fs.sidecar.validate.codes import CODES, Code
from lora_fs.sidecar.validate.folder import looks_preallocated, open_adapter, validate
from lora_fs.sidecar.validate.report import Expectation, Learned, Peer, Report
from lora_fs.sidecar.validate.since import heeds_all, needs_newer, too_old, version_problem

__all__ = [
    "CODES",
    "BaseOfEngine",
    "Code",
    "Expectation",
    "Learned",
    "Peer",
    "Report",
    "compared",
    "expect",
    "heeds_all",
    "load_base_config",
    "looks_preallocated",
    "needs_newer",
    "open_adapter",
    "too_old",
    "validate",
    "version_problem",
]
