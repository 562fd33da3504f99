"""A program with a vLLM of its own: trains adapters, and serves each from memory. Prints what it saw as JSON.

It also serves each from a folder by ``load_inplace``, and one from a folder that comes late.
A script of ``test_from_tensors``, run with the plugin. Arguments: the base model's folder, and one for files.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from lora_fs.worker_patch.from_tensors import load_lora_adapter_from_tensors, unload_lora_adapter
from lora_fs.worker_patch.worker.slots.steps import RETRY_S

TOKENS = [1, 300, 310, 320, 330, 340, 350]
STEPS = 3


def by_peft(model: Any) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].log_softmax(-1)
    return [float(logits[at, token]) for at, token in enumerate(TOKENS[1:])]


def by_vllm(llm: LLM, request: Any = None) -> list[float]:
    how = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [answer] = llm.generate({"prompt_token_ids": TOKENS}, how, lora_request=request, use_tqdm=False)
    given: Any = answer.prompt_logprobs
    return [given[at][token].logprob for at, token in enumerate(TOKENS) if at]


def in_place(llm: LLM, folder: Path) -> list[float]:
    """Of what is in a folder now, by the same name and id at every step."""
    return by_vllm(llm, LoRARequest("in-place", 70, str(folder), load_inplace=True))


def late(llm: LLM, trained: Any, folder: Path) -> dict[str, list[float]]:
    """Of a folder before it is there, and after; a step may not try again at once."""
    request = LoRARequest("late", 71, str(folder))
    before = by_vllm(llm, request)
    trained.save_pretrained(folder)
    time.sleep(2 * RETRY_S)
    return {"before": before, "after": by_vllm(llm, request), "peft": by_peft(trained)}


def main(model_dir: str, files: Path) -> None:
    llm = LLM(
        model_dir,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=256,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
    )
    torch.manual_seed(3)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    trained = get_peft_model(LlamaForCausalLM.from_pretrained(model_dir), config)
    optimizer = torch.optim.SGD(trained.parameters(), lr=5.0)
    seen: list[dict[str, Any]] = []
    before: Any = None
    for _ in range(STEPS):
        tensors = get_peft_model_state_dict(trained)
        request = load_lora_adapter_from_tensors(llm, "policy", tensors, trained.peft_config["default"])
        earlier = None if before is None else by_vllm(llm, before)
        if before is not None:
            unload_lora_adapter(llm, before)
        trained.save_pretrained(files / "policy")
        seen.append({"peft": by_peft(trained), "vllm": by_vllm(llm, request), "earlier": earlier})
        seen[-1]["in place"] = in_place(llm, files / "policy")
        trained(torch.tensor([TOKENS]), labels=torch.tensor([TOKENS])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        before = request
    came = late(llm, trained, files / "late")
    print(json.dumps({"steps": seen, "base": by_vllm(llm), "late": came}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
