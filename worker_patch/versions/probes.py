"""What a vLLM does, tried: names and parameters stay the same where answers change.

Each probe returns None, or why lora-fs cannot serve in this vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

from lora_fs.sidecar.model import engine_name
from lora_fs.worker_patch.versions import layers


def layer_kinds() -> str | None:
    """``versions.layers`` lists every kind of LoRA layer that vLLM has."""
    strangers = layers.strangers()
    if strangers:
        return f"it has kinds of LoRA layers that this plugin does not know: {', '.join(sorted(strangers))}"
    return None


def prefix_blocks() -> str | None:
    """Two revisions, named as the plugin does, share no prefix block: 0.30 looks at the name alone."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    def keys(digest: str) -> object:
        lora = LoRARequest(engine_name("sql", digest), 1, f"/stage/{digest}")
        request = SimpleNamespace(lora_request=lora, mm_features=[], cache_salt=None, prompt_embeds=None)
        return generate_block_hash_extra_keys(request, 0, 16, 0)[0]

    if keys("sha256:" + "1" * 64) == keys("sha256:" + "2" * 64):
        return "two revisions of a name share prefix blocks: one would be answered from the other's"
    return None


PROBES: tuple[Callable[[], str | None], ...] = (layer_kinds, prefix_blocks)


def failing() -> Iterator[str]:
    """Why lora-fs cannot serve in this vLLM, one sentence for each failed probe."""
    for probe in PROBES:
        try:
            why = probe()
        except Exception as error:
            why = f"{probe.__name__} cannot be tried: {error!r}"
        if why is not None:
            yield why
