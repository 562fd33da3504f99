"""Whether the plugin can serve in this vLLM, and its Python. Runs before it hooks anything.

If ``VLLM_PLUGINS`` names it in a vLLM that does not fit, the server does not start: one that serves without
its adapters looks well and answers 404. In a minor newer than the tested ones it serves if the surface is
the expected one and every probe holds. A replica's state names it as untested. This module
imports in any Python: an error there would be one that vLLM logs, and serves without its adapters.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from functools import cache
from typing import NoReturn

logger = logging.getLogger(__name__)

NAME = "lora_fs"
TESTED = ("0.30", "0.31", "0.32", "0.33")
PYTHON = (3, 11)


def chosen() -> bool:
    """Whether the operator named this plugin: a vLLM may have lora-fs beside it for the CLI alone."""
    return NAME in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]


def fits() -> bool:
    """Whether to hook this vLLM; False only where the operator wants the base model alone then.

    Raises:
        SystemExit: it does not fit, or a setting cannot be. vLLM catches what else a plugin raises, and
            serves without it.
    """
    if sys.version_info < PYTHON:
        stop_for_python()
    from pydantic import ValidationError

    from lora_fs.sidecar.errors import InputError
    from lora_fs.sidecar.settings import load_settings, refusal

    reason = unfit()
    try:
        settings = load_settings()
    except (ValidationError, InputError) as error:
        told = refusal(error) if isinstance(error, ValidationError) else str(error)
        raise SystemExit(f"lora-fs: the server does not start: {told}") from None
    if reason is None:
        return True
    if settings.unfit == "stop":
        stop(reason)
    return False


def stop(reason: str) -> NoReturn:
    """End the process with one line."""
    raise SystemExit(
        f"lora-fs cannot serve in this vLLM, and the server does not start: {reason}. Use vLLM "
        f"{', '.join(TESTED)}; or set LORA_FS_UNFIT=serve-base for the base model alone, without adapters"
    )


def stop_for_python() -> NoReturn:
    """End the process with one line; no setting can be read, since nothing else of lora-fs imports there."""
    here, needed = (".".join(map(str, version)) for version in (sys.version_info[:3], PYTHON))
    raise SystemExit(
        f"lora-fs cannot serve in this vLLM, and the server does not start: its Python is {here}, and "
        f"{needed} is the oldest that is served. Use an image with a newer Python; or take {NAME} out "
        "of VLLM_PLUGINS for the base model alone, without adapters"
    )


def tell_base_alone() -> None:
    """Log that nothing of the registry is served. Waits for vLLM's log of the plugin's load."""
    text = "lora-fs serves NO ADAPTERS here, as LORA_FS_UNFIT=serve-base wants it: %s"
    logger.error(text, unfit())


@cache
def unfit() -> str | None:
    """Why the plugin cannot serve in this vLLM, or None."""
    version, minor = _version()
    if rust_front_end():
        return "its Rust front end loads no plugin: unset VLLM_USE_RUST_FRONTEND, or serve with a sidecar"
    if minor is None:
        return f"its version, {version!r}, is none"
    if minor < _minors()[0]:
        return f"it is version {version}, and the oldest that is served is {TESTED[0]}"
    try:
        from lora_fs.worker_patch.versions import probes, surface
    except ImportError as error:
        return f"what is hooked is not there in {version}: {error}"
    lacks = next(surface.missing(), None) or next(probes.failing(), None)
    return None if lacks is None else f"it is version {version}, and {lacks}"


def rust_front_end() -> bool:
    """Whether what answers requests is no Python; the engine core loads the plugin all the same."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_USE_RUST_FRONTEND", False))


def untested() -> str | None:
    """The condition of a vLLM that is newer than the tested ones, and fits; else None."""
    version, minor = _version()
    if minor in _minors():
        return None
    return f"VllmUntested: this is vLLM {version}, and lora-fs was tested on {', '.join(TESTED)}"


def _version() -> tuple[str, tuple[int, int] | None]:
    import vllm

    found = re.match(r"(\d+)\.(\d+)(?![\d])", str(vllm.__version__))
    return str(vllm.__version__), (int(found[1]), int(found[2])) if found else None


def _minors() -> list[tuple[int, int]]:
    return [(int(major), int(minor)) for major, minor in (tested.split(".") for tested in TESTED)]
