"""Make a tiny random Llama and real PEFT adapters for it, the same bytes at every run.

Owns the recipe only: a float32 model of 64 hidden units with a tokenizer trained on the
spot, and adapters written by the peft library itself. The weights are random, so what it
says means nothing; but it says whole English words, and every adapter makes it say others.
Nothing is downloaded. ``python -m lora_fs.demo.tiny_llama OUT --adapters 4`` makes
``OUT/tiny`` and ``OUT/adapters/a0`` to ``a3``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MODEL_NAME = "tiny"
RANKS = (4, 8, 16)
HIDDEN = 64
CONTEXT = 256
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_MODEL_SEED = 20260
_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_WORDS = """
amber anchor apple autumn bakery balcony basket beacon birch bottle bridge bright brook button
candle canyon castle cedar chapel cherry circle clever clover coast copper coral cotton cradle
crystal curtain daisy desert diamond dragon driftwood early ember falcon feather field forest
fountain fox garden gentle ginger glacier golden granite harbour harvest hazel hidden hollow
honey horizon island ivory jacket jasmine jungle kettle kingdom ladder lantern lavender lemon
letter library linen lively lunar maple marble meadow melody mirror misty morning mountain
music narrow nectar needle noble north ocean olive orchard otter oxford paper pebble pepper
pillow pine planet plaza pocket polar prairie quartz quiet rabbit raven ribbon river robin
rocket rose saddle saffron sailor sandy scarlet season shadow silver simple spring sparrow
spruce station stone storm summer sunset swift table temple thunder timber tower travel tulip
tunnel turtle twilight valley velvet village violet walnut water whisper willow window winter
wonder yellow zephyr hello world what where when support customer question answer please help
""".split()


def ensure_model(out_dir: Path, *, kv_heads: int = 2) -> Path:
    """Make the base model in ``out_dir`` unless a whole one lies there; returns ``out_dir``.

    The folder's name is what the model is called: adapters record it as their base model.

    Args:
        kv_heads: 1 or 2; one is shared by both workers of a tensor-parallel engine.
    """
    if (out_dir / "config.json").exists():
        return out_dir
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with _whole_folder(out_dir) as folder:
        tokenizer = _train_tokenizer()
        torch.manual_seed(_MODEL_SEED)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=2 * HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=kv_heads,
            max_position_embeddings=CONTEXT,
            initializer_range=0.3,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            # A logit of zero never wins against the best of the words, so greedy decoding
            # speaks whole words and never ends early.
            model.lm_head.weight[_unspoken(tokenizer)] = 0.0
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return out_dir


def make_adapter(
    base_dir: Path,
    out_dir: Path,
    seed: int,
    *,
    rank: int = 8,
    target_modules: Sequence[str] = TARGET_MODULES,
) -> Path:
    """Write a PEFT adapter whose B is random, so that it changes every answer.

    Args:
        base_dir: a model made by ``ensure_model``.
        out_dir: the adapter's folder; kept as it is if it holds an adapter already.
        seed: distinct seeds give distinct answers, equal seeds equal bytes.
        rank: 1 to 16 in what the engines here accept.
        target_modules: the projections the adapter changes.
    Returns:
        ``out_dir``.
    """
    if (out_dir / "adapter_config.json").exists():
        return out_dir
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=list(target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(seed)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base_dir), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
    with _whole_folder(out_dir) as folder:
        model.save_pretrained(folder)
        _sort_target_modules(folder / "adapter_config.json")
    return out_dir


def _sort_target_modules(config_path: Path) -> None:
    """peft keeps them in a set, whose order changes from run to run."""
    config = json.loads(config_path.read_text())
    config["target_modules"].sort()
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True))


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside ``target`` to write to; it takes the name once the block ends."""
    draft = target.with_name(f".{target.name}.making")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    yield draft
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _train_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text goes in, and each of ``_WORDS`` is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f" {word}" for word in sorted(set(_WORDS))] * 2, trainer)
    pad, bos, eos = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _unspoken(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that are not one of ``_WORDS`` with the space before it."""
    spoken = {tokenizer.encode(f" {word}", add_special_tokens=False)[0] for word in _WORDS}
    return [token for token in range(len(tokenizer)) if token not in spoken]


def main() -> None:
    """Make the model and ``--adapters`` adapters under one folder and say where they are."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--adapters", type=int, default=4, metavar="N")
    parser.add_argument("--kv-heads", type=int, default=2, metavar="N")
    options = parser.parse_args()
    base = ensure_model(options.out / MODEL_NAME, kv_heads=options.kv_heads)
    print(base)
    for index in range(options.adapters):
        rank = RANKS[index % len(RANKS)]
        print(make_adapter(base, options.out / "adapters" / f"a{index}", index, rank=rank))


if __name__ == "__main__":
    main()
