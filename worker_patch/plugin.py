"""What vLLM's entry points name: one function a group. In a vLLM it is not for, both end the process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_fs.worker_patch import compat

if TYPE_CHECKING:
    from lora_fs.worker_patch.api.endpoint import Endpoint


def register() -> None:
    """``vllm.general_plugins``: called in the API server, in the engine core and in every worker."""
    if not compat.chosen():
        return
    if compat.fits():
        from lora_fs.worker_patch.worker import hooks

        hooks.install()
    elif compat.rust_front_end():  # it asks for no endpoint, which would say it
        compat.tell_base_alone()


def endpoint_plugin() -> Endpoint:
    """``vllm.endpoint_plugins``: called in every API server, if VLLM_PLUGINS names it."""
    fit = compat.fits()
    try:
        from lora_fs.worker_patch.api.endpoint import Endpoint
    except ImportError as error:
        compat.stop(f"its endpoint cannot be imported: {error}")
    return Endpoint(fit=fit)
