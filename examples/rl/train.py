"""Train a LoRA by REINFORCE on this machine's CPU: publish each policy to a fleet, and sample from the fleet.

    python train.py --model MODEL --gateway http://gateway:8001 --output /adapters/run1 --steps 12

``--output`` lies under one of the replicas' ``LORA_FS_ALLOWED_SOURCES``. Each policy is saved there as
``policy-vN``. Another run goes on after the newest one. The reward counts one letter: put your own in its
place. The script needs `openai`, `peft` and `transformers`. It sends the token of the file that
``LORA_FS_CLIENT_TOKEN_FILE`` names.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

PROMPTS = ("hello world", "river stone", "what customer", "silver morning")
SAMPLES = 32  # of each prompt: their mean reward is what each of them is compared with
TOKENS = 8
LORA = LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
)


@dataclass(frozen=True)
class Sample:
    """Token ids of a prompt and of one completion, and that one's reward less the mean of its prompt."""

    prompt: list[int]
    completion: list[int]
    advantage: float


def reward(text: str) -> float:
    """Score a completion: how many letters of 100 are an ``r``."""
    return 100 * text.count("r") / max(1, len(text))


def publish(fleet: OpenAI, folder: Path) -> float:
    """Load a saved policy on every replica, by its folder's name; returns the seconds until all have it."""
    began = time.monotonic()
    body = {"lora_name": folder.name, "lora_path": str(folder)}
    fleet.post("/load_lora_adapter", body=body, cast_to=httpx.Response)
    return time.monotonic() - began


def withdraw(fleet: OpenAI, policy: str) -> None:
    """Take a policy away from every replica."""
    fleet.post("/unload_lora_adapter", body={"lora_name": policy}, cast_to=httpx.Response)


def sampled(fleet: OpenAI, policy: str) -> tuple[float, list[Sample]]:
    """Ask the fleet for ``SAMPLES`` completions of each prompt; returns their mean reward, and them."""
    rewards, samples = list[float](), list[Sample]()
    for prompt in PROMPTS:
        answer = fleet.completions.create(
            model=policy,
            prompt=prompt,
            n=SAMPLES,
            max_tokens=TOKENS,
            temperature=1,
            extra_body={"return_token_ids": True},
        )
        group = [reward(choice.text) for choice in answer.choices]
        mean = sum(group) / len(group)
        rewards += group
        for choice, scored in zip(answer.choices, group, strict=True):
            ids = choice.model_dump()
            samples.append(Sample(ids["prompt_token_ids"], ids["token_ids"], scored - mean))
    return sum(rewards) / len(rewards), samples


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> None:
    """Make completions likelier that were better than their prompt's mean, and the others less likely."""
    scale = max(1e-6, sum(abs(sample.advantage) for sample in samples) / len(samples))
    optimizer.zero_grad()
    for sample in samples:
        ids = torch.tensor([sample.prompt + sample.completion])
        logits = model(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1]
        chosen = torch.tensor(sample.completion).unsqueeze(1)
        likely = logits.log_softmax(-1).gather(1, chosen).sum()
        (-likely * sample.advantage / scale / len(samples)).backward()
    optimizer.step()


def token() -> str:
    """Return the token that may load and unload adapters."""
    file = os.environ.get("LORA_FS_CLIENT_TOKEN_FILE")
    return Path(file).read_text().strip() if file else "none"


def numbers(output: Path) -> list[int]:
    """Return the numbers of the policies saved so far."""
    return [int(folder.name.removeprefix("policy-v")) for folder in output.glob("policy-v*")]


def main() -> None:
    """Train: a line for each policy, with its mean reward and how long the next one's publication took."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", required=True, help="as transformers loads it")
    options.add_argument("--gateway", required=True, metavar="URL")
    options.add_argument("--output", required=True, type=Path)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--learning-rate", type=float, default=0.03)
    given = options.parse_args()
    logging.disable_progress_bar()
    torch.manual_seed(0)
    output = given.output.resolve()
    fleet = OpenAI(base_url=f"{given.gateway}/v1", api_key=token())
    base = AutoModelForCausalLM.from_pretrained(given.model)
    saved = numbers(output)
    number = max(saved, default=0)
    newest = output / f"policy-v{number}"
    if saved:
        model = PeftModel.from_pretrained(base, newest, is_trainable=True)
    else:
        model = get_peft_model(base, LORA)
        model.save_pretrained(newest)
    if newest.name not in {card.id for card in fleet.models.list()}:
        publish(fleet, newest)
    weights = (weight for weight in model.parameters() if weight.requires_grad)
    optimizer = torch.optim.Adam(weights, lr=given.learning_rate)
    for _ in range(given.steps):
        policy, number = f"policy-v{number}", number + 1
        mean, samples = sampled(fleet, policy)
        update(model, optimizer, samples)
        following = output / f"policy-v{number}"
        model.save_pretrained(following)
        took = publish(fleet, following)
        withdraw(fleet, policy)
        print(f"{policy}: reward {mean:.1f}; {following.name} published in {took:.2f} s", flush=True)


if __name__ == "__main__":
    main()
