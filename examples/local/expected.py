"""What transformers and PEFT say with an adapter, without vLLM: the answers that an engine should give.

``python -m lora_fs.demo.expected BASE ADAPTER`` prints test cases for ``lora-fs evaluate``, one a line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

PROMPTS = tuple(
    f"hello {word}" for word in "world walnut timber noble hazel tulip canyon falcon amber coral".split()
)
TOKENS = 8


def answers(base_dir: Path, adapter: Path, prompts: Sequence[str], tokens: int) -> list[str]:
    """Return the greedy answer of ``tokens`` tokens to each prompt."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), adapter)
    said = []
    for text in prompts:
        prompt = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0]
        said.append(tokenizer.decode(ids[prompt["input_ids"].shape[1] :], skip_special_tokens=True))
    return said


def main() -> None:
    """Print a case for each of ten prompts."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("base", type=Path, help="the model's folder")
    parser.add_argument("adapter", type=Path, help="the adapter's folder")
    options = parser.parse_args()
    said = answers(options.base, options.adapter, PROMPTS, TOKENS)
    for prompt, answer in zip(PROMPTS, said, strict=True):
        print(json.dumps({"prompt": prompt, "expect": {"exact": answer}, "max_tokens": TOKENS}))


if __name__ == "__main__":
    main()
