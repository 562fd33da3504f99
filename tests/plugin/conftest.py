"""vLLM is imported here once, with the warnings that are its own and torch's."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.entrypoints.openai.models.serving
    import vllm.lora.worker_manager
    import vllm.v1.worker.lora_model_runner_mixin  # noqa: F401
