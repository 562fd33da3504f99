"""The adapter that the current request may use: vLLM's handlers look it up by name.

vLLM's ``OpenAIServingModels.lora_requests`` is a dict that only grows. A view replaces it: of the
adapters vLLM was started with and of the one that the gate has ready for this request. Any other
name is unknown, whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass

from vllm.lora.request import LoRARequest


@dataclass(frozen=True, slots=True)
class Asked:
    """``name``: as the client wrote it. ``request``: what the engine gets."""

    name: str
    request: LoRARequest


asked: ContextVar[Asked | None] = ContextVar("lora_fs_asked", default=None)


class Requests(MutableMapping[str, LoRARequest]):
    """``static``: the adapters of ``--lora-modules``, which are vLLM's own and stay so."""

    def __init__(self, static: MutableMapping[str, LoRARequest]) -> None:
        self.static = static

    def __getitem__(self, name: str) -> LoRARequest:
        now = asked.get()
        if now is not None and now.name == name:
            return now.request
        return self.static[name]

    def __setitem__(self, name: str, request: LoRARequest) -> None:
        self.static[name] = request

    def __delitem__(self, name: str) -> None:
        del self.static[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.static)

    def __len__(self) -> int:
        return len(self.static)
