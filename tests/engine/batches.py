"""Ask a vLLM of this process for several adapters and none in one batch. Scripts beside it import this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

TOKENS = 2  # of which the second comes of a step without a prompt


def answers(llm: LLM, prompts: Sequence[Sequence[int]], adapters: Sequence[str]) -> list[dict[str, Any]]:
    """Return each answer's ``tokens``, the prompt's first, and the ``logprobs`` of all but the first.

    Args:
        prompts: token ids.
        adapters: folders. Each prompt is asked of the base model, then of each of them.
    """
    how = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    requests = [None, *(LoRARequest(f"a{n}", n, folder) for n, folder in enumerate(adapters, 1))]
    found = []
    for prompt in prompts:
        batch: Any = [{"prompt_token_ids": list(prompt)}] * len(requests)
        given: Any = llm.generate(batch, how, lora_request=requests, use_tqdm=False)
        for answer in given:
            made = answer.outputs[0]
            seen = [answer.prompt_logprobs[at][token].logprob for at, token in enumerate(prompt) if at]
            seen += [one[token].logprob for one, token in zip(made.logprobs, made.token_ids, strict=True)]
            found.append({"tokens": [*prompt, *made.token_ids], "logprobs": seen})
    return found
