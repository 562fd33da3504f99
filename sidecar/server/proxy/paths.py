"""Which of the engine's paths the proxy serves, and which requests it refuses by their heads alone.

A test compares the lists with the engine's own ``/openapi.json``: a route of a new vLLM is put into one.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import unquote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from lora_fs.sidecar.errors import InputError

# Looked for before a hundred paths of ours, each of which is a pattern.
COMMON: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
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
NO_WEBSOCKET: Final = (
    "this server forwards no WebSocket, since no adapter can be held for one: send HTTP requests, or connect "
    "to the engine's own port"
)
_LORA_ROUTES: Final = frozenset({"load_lora_adapter", "unload_lora_adapter"})


def leaves_its_route(path: str) -> bool:
    """Return whether the engine might read ``path`` as another route than the one matched here.

    The sidecar alone loads and unloads: its own routes for that check the caller's token.
    """
    plain = unquote(unquote(path)).replace("\\", "/")
    segments = plain.rstrip("/").split("/")[1:]
    return not {".", "..", ""}.isdisjoint(segments) or segments[-1] in _LORA_ROUTES


class Forwardable:
    """Refuse a path that this server does not forward, before it reads the body.

    Raises:
        InputError: the path leaves its route. HTTPException: 501 for a WebSocket.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("latin-1")
        if leaves_its_route(path):
            raise InputError(f"the path {path[:200]!r} is not one that this server forwards")
        if Headers(scope=scope).get("upgrade", "").lower() == "websocket":
            raise HTTPException(501, NO_WEBSOCKET)
        await self._app(scope, receive, send)
