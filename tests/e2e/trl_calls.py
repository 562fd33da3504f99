"""The HTTP calls of TRL 1.16's asynchronous GRPO: its client's, and its rollout worker's.

They follow ``trl/experimental/async_grpo/vllm_client.py`` and ``async_rollout_worker.py``, bodies and checks.
``examples/trl/check.py`` runs TRL itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass
class TrlCalls:
    """``VLLMClient``'s methods, by their names, and one turn of a rollout."""

    http: httpx.Client

    def wait_for_server_ready(self) -> None:
        assert self.http.get("/health").status_code == 200

    def get_max_model_len(self) -> int:
        models = self.http.get("/v1/models").raise_for_status()
        return int(models.json()["data"][0]["max_model_len"])

    def get_server_info(self) -> dict[str, Any]:
        answer = self.http.get("/server_info", params={"config_format": "json"}).raise_for_status()
        told: dict[str, Any] = answer.json()["vllm_config"]
        return told

    def load_lora_adapter(self, lora_name: str, lora_path: str) -> None:
        body = {"lora_name": lora_name, "lora_path": lora_path, "load_inplace": False}
        answer = self.http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text

    def unload_lora_adapter(self, lora_name: str) -> None:
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": lora_name})  # TRL checks nothing

    def pause(self) -> None:
        answer = self.http.post("/pause", params={"mode": "keep"})
        assert answer.status_code == 200, answer.text

    def resume(self) -> None:
        answer = self.http.post("/resume")
        assert answer.status_code == 200, answer.text

    def turn(
        self, model: str, prompt_ids: list[int], max_tokens: int, temperature: float
    ) -> tuple[list[int], list[float]]:
        """``_generate_one_turn``: the tokens and their log-probabilities."""
        payload = {
            "model": model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0,
            "n": 1,
            "return_token_ids": True,
            "logprobs": 0,
            "seed": random.getrandbits(63),
        }
        choice = self.http.post("/v1/completions", json=payload).raise_for_status().json()["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]
