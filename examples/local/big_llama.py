"""A Llama whose adapters have weight, and the two engines that are compared with it.

The model has 1024 hidden units in 8 layers, so that an adapter of rank 64 is 19 MB in bfloat16;
both are random and made on the spot. ``engine_pair`` serves any model twice from the same
adapters: by stock vLLM with its own filesystem resolver, and by vLLM with the plugin.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lora_fs.demo.engine import WORKER_APART, EngineFarm
from lora_fs.demo.process import Process
from lora_fs.demo.tiny_llama import MODEL_NAME, TARGET_MODULES, ensure_model
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation

RANK = 64
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 1024, 2816, 8, 16, 8, 64
# Inputs and outputs of each projection.
_SHAPES = {
    "q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "gate_proj": (HIDDEN, INTERMEDIATE),
    "up_proj": (HIDDEN, INTERMEDIATE),
    "down_proj": (INTERMEDIATE, HIDDEN),
}
ENGINE_ARGS = ("--max-lora-rank", str(RANK))


def make_big_model(folder: Path) -> Path:
    """Write the model ``folder/big``, with the tokenizer of the tiny one."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tiny = ensure_model(folder / MODEL_NAME)
    config = LlamaConfig.from_pretrained(tiny)
    for name, value in {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "initializer_range": 0.02,
    }.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    out = folder / "big"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(out)
    return out


def make_big_adapter(base: Path, out: Path, seed: int, rank: int = RANK) -> Path:
    """Write an adapter as PEFT lays it out; B is random, so it changes every answer."""
    import torch
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in TARGET_MODULES:
            inputs, outputs = _SHAPES[name]
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            for which, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                weight = torch.randn(shape, generator=generator) * 0.02
                tensors[f"{prefix}.lora_{which}.weight"] = weight.to(torch.bfloat16)
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": str(base),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(TARGET_MODULES),
        "task_type": "CAUSAL_LM",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def register_all(root: Path, model: Path, adapters: Path) -> None:
    """Register every adapter of a folder, as the command does, under its folder's name."""
    registry = Registry(root, create=True)
    scope = Scope("default", model.name)
    for folder in sorted(adapters.iterdir()):
        wanted = Registration(folder.name, folder, folder.as_uri())
        ingest.register(registry, scope, wanted, Expectation((model.name,)), writer="benchmark")


def engine_pair(
    farm: EngineFarm,
    model: Path,
    adapters: Path,
    root: Path,
    work: Path,
    args: Sequence[str] = (),
    *,
    worker_apart: bool = False,
    kernels: str = "auto",
) -> dict[str, Process]:
    """Start both engines with the same arguments, and wait until each can serve.

    Args:
        adapters: the folder that stock vLLM resolves names in.
        root: a registry of the same adapters, which the plugin reads.
        work: gets the plugin's staged files.
        args: more vLLM arguments for both.
        worker_apart: in a process of its own, beside the engine's core; started by vLLM's own command.
        kernels: the plugin's ``LORA_FS_KERNELS``.
    """
    start = farm.start_by_command if worker_apart else farm.start
    processes = WORKER_APART if worker_apart else {}
    stock_env = {
        "VLLM_PLUGINS": "lora_filesystem_resolver",
        "VLLM_LORA_RESOLVER_CACHE_DIR": str(adapters),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    }
    plugin_env = {
        "VLLM_PLUGINS": "lora_fs",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
        "LORA_FS_ROOT": str(root),
        "LORA_FS_MODEL": model.name,
        "LORA_FS_STAGE_DIR": str(work / f"stage-{model.name}"),
        "LORA_FS_REPLICA_ID": f"benchmark-{model.name}",
        "LORA_FS_KERNELS": kernels,
        "LORA_FS_INSECURE": "1",  # it unloads over HTTP
    }
    engines = {
        "stock": start(f"stock-{model.name}", model, args=args, env={**stock_env, **processes}),
        "plugin": start(f"plugin-{model.name}", model, args=args, env={**plugin_env, **processes}),
    }
    engines["stock"].wait_ready(timeout_s=300)
    engines["plugin"].wait_ready("/readyz", timeout_s=300)
    return engines
