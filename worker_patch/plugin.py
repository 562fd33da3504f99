"""What vLLM's entry points name: one function a group. Neither raises for a vLLM it is not for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_fs.worker_patch import compat

if TYPE_CHECKING:
    from lora_fs.worker_patch.api.endpoint import Endpoint


def register() -> None:
    """``vllm.general_plugins``: called in the API server, in the engine core and in every worker."""
    if compat.chosen() and compat.unfit() is None:
        from lora_fs.worker_patch.worker import hooks

        hooks.install()


def endpoint_plugin() -> Endpoint:
    """``vllm.endpoint_plugins``: called in every API server, if VLLM_PLUGINS names it."""
    from lora_fs.worker_patch.api.endpoint import Endpoint

    return Endpoint(fit=compat.unfit() is None)
