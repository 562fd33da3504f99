"""Which vLLM this plugin is for. On another one it does nothing and says so once.

A version of the tested ones that differs in what is relied upon, as a fork may, is refused as well: before
anything is hooked, ``versions`` is walked.
"""

from __future__ import annotations

import logging
import os
from functools import cache

logger = logging.getLogger(__name__)

NAME = "lora_fs"
TESTED = ("0.31", "0.32", "0.33")


def chosen() -> bool:
    """Whether the operator named this plugin: lora-fs may be installed beside a vLLM for its CLI alone."""
    return NAME in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]


@cache
def unfit() -> str | None:
    """Why this vLLM is left as it is, or None. Told once a process."""
    reason = _unfit()
    if reason is not None:
        logger.error("lora-fs leaves this vLLM as it is: %s", reason)
    return reason


def _unfit() -> str | None:
    import vllm

    if not vllm.__version__.startswith(tuple(f"{tested}." for tested in TESTED)):
        return f"it is version {vllm.__version__}, and this plugin was tested on {', '.join(TESTED)}"
    try:
        from lora_fs.worker_patch.versions import probes, surface
    except ImportError as error:
        return f"what is hooked is not there: {error}"
    return next(surface.missing(), None) or next(probes.failing(), None)
