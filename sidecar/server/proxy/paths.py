"""Which of the engine's paths the proxy serves, and which spellings of a path it refuses.

A test compares the lists with the engine's own ``/openapi.json``: a route of a new vLLM is put into one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

# Besides all of /v1/. Each names its model in the body, or needs none.
INFERENCE: Final = (
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/generative_scoring",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/inference/v1/generate",
    "/version",
)
# The engine's operator calls these at the engine's own port. /invocations takes its adapter from a header.
NOT_FORWARDED: Final = frozenset(
    """/abort_requests /collective_rpc /fault_tolerance/apply /fault_tolerance/status /finish_weight_update
    /get_world_size /health /inference/v1/abort_requests /init_weight_transfer_engine /invocations /is_paused
    /is_scaling_elastic_ep /is_sleeping /kv_event_sources /load /metrics /pause /ping /ready /readyz
    /release_kv_cache_memory /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume
    /scale_elastic_ep /server_info /shutdown_weight_transfer_engine /sleep /start_draft_weight_update
    /start_profile /start_weight_update /stop_profile /tokenizer_info /update_weight_version /update_weights
    /wake_up /weight_checker /weight_info""".split()
)
METHODS: Final = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
_LORA_ROUTES: Final = frozenset({"load_lora_adapter", "unload_lora_adapter"})


def leaves_its_route(path: str) -> bool:
    """Return whether the engine might read ``path`` as another route than the one matched here.

    The sidecar alone loads and unloads: its own routes for that check the caller's token.
    """
    plain = unquote(unquote(path)).replace("\\", "/")
    segments = plain.rstrip("/").split("/")[1:]
    return not {".", "..", ""}.isdisjoint(segments) or segments[-1] in _LORA_ROUTES
