"""Train a LoRA with TRL's AsyncGRPOTrainer, which samples from all replicas behind `lora-fs gateway`.

    python train.py --model MODEL --gateway http://gateway:8001 --output /adapters/run1

``--output`` lies on the shared volume, under one of the replicas' ``LORA_FS_ALLOWED_SOURCES``. The reward
counts one letter: put your own in its place. The script needs `trl` and `peft`. TRL packs samples with a
CUDA kernel: ``--on-cpu`` replaces it by the same attention in torch, which is slow.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from trl.experimental import async_grpo
from trl.experimental.async_grpo import async_grpo_trainer, packing

WORDS = "river stone garden winter question customer answer silver".split()


def reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Score each completion: how many letters of 100 are an ``r``."""
    texts = [messages[-1]["content"] for messages in completions]
    return [100 * text.count("r") / max(1, len(text)) for text in texts]


class TorchAttention:
    """What TRL asks of flash-attn3: causal attention within each segment, its queries at its keys' end."""

    @staticmethod
    def flash_attn_varlen_func(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        queries_at: torch.Tensor,
        keys_at: torch.Tensor,
        *_: int,
        softmax_scale: float | None,
        **__: Any,
    ) -> torch.Tensor:
        """Attend segment after segment."""
        shared = query.shape[1] // key.shape[1]
        done = []
        for (q, q_end), (k, k_end) in zip(
            pairwise(queries_at.tolist()), pairwise(keys_at.tolist()), strict=True
        ):
            parts = [query[q:q_end], *(one[k:k_end].repeat_interleave(shared, 1) for one in (key, value))]
            seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool).tril(k_end - k - (q_end - q))
            done.append(
                torch.nn.functional.scaled_dot_product_attention(
                    *(part.transpose(0, 1) for part in parts), attn_mask=seen, scale=softmax_scale
                ).transpose(0, 1)
            )
        return torch.cat(done)


def main() -> None:
    """Train."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True, help="as transformers loads it")
    options.add_argument("--gateway", required=True, metavar="URL")
    options.add_argument("--output", required=True, type=Path)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--max-staleness", type=int, default=2, help="the engines need 2 more --max-loras")
    options.add_argument("--learning-rate", type=float, default=1e-5)
    options.add_argument("--on-cpu", action="store_true")
    given = options.parse_args()
    if given.on_cpu:
        packing._flash_attn = TorchAttention
        async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # of a card's name
    args = async_grpo.AsyncGRPOConfig(
        output_dir=str(given.output),
        vllm_server_base_url=given.gateway,
        max_steps=given.steps,
        max_staleness=given.max_staleness,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=16,
        learning_rate=given.learning_rate,
        dtype="float32" if given.on_cpu else "bfloat16",
        bf16=not given.on_cpu,
        use_cpu=given.on_cpu,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = async_grpo.AsyncGRPOTrainer(
        given.model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": word}] for word in WORDS]}),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
