"""The engines of ``bench_gpu_serving``: their model, their adapters, and how each is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx

PORTS = {"stock": 8101, "plugin": 8102, "triton": 8103}
START_S = 240
_RUN = "import sys; from lora_fs.sidecar.cli import main; sys.argv[0] = 'lora-fs'; main()"
LORA_FS = [sys.executable, "-c", _RUN]
# Of an 8B Llama's layer: inputs and outputs.
MODULES = {
    "self_attn.q_proj": (4096, 4096),
    "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024),
    "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336),
    "mlp.up_proj": (4096, 14336),
    "mlp.down_proj": (14336, 4096),
}
# No compiled code: see pack_engine.py.
NATIVE = {
    "--attention-backend": "TRITON_ATTN",
    "--compilation-config": {
        "mode": 0,
        "custom_ops": ["none"],
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
    },
    "--kernel-config": {
        "ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]},
        "enable_flashinfer_autotune": False,
        "enable_jit_warmup": False,
        "enable_cutedsl_warmup": False,
    },
}
SIZES = {
    "--load-format": "dummy",
    "--dtype": "bfloat16",
    "--max-model-len": 2048,
    "--kv-cache-memory-bytes": 2 << 30,
    "--gpu-memory-utilization": 0.2,
    "--max-loras": 8,
    "--max-cpu-loras": 64,
    "--max-lora-rank": 64,
    "--max-num-seqs": 64,
    "--max-num-batched-tokens": 2048,
}


def start(name: str, work: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start one engine, whose log goes to ``out``."""
    env = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(int(name == "stock")),
    }
    if name == "stock":
        env["VLLM_PLUGINS"] = "lora_filesystem_resolver"
        env["VLLM_LORA_RESOLVER_CACHE_DIR"] = str(work / "adapters")
    else:
        env |= {**registry_env(work), "VLLM_PLUGINS": "lora_fs", "LORA_FS_INSECURE": "1"}
        env |= {"LORA_FS_STAGE_DIR": str(work / f"stage-{name}"), "LORA_FS_HOST_BYTES": str(6 << 30)}
        if name == "triton":
            env["LORA_FS_KERNELS"] = "triton"
    options = {"--model": work / "model", "--served-model-name": "model", "--host": "127.0.0.1"}
    options |= {"--port": PORTS[name], **SIZES, **NATIVE}
    told = [
        part if isinstance(part, str) else json.dumps(part) if isinstance(part, dict) else str(part)
        for pair in options.items()
        for part in pair
    ]
    module = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    with (out / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*module, *told, "--enable-lora", "--no-enable-prefix-caching"],
            env=env,
            cwd=work,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def registry_env(work: Path) -> dict[str, str]:
    return {"LORA_FS_ROOT": str(work / "registry"), "LORA_FS_MODEL": "model"}


def make_model(folder: Path, layers: int) -> None:
    """A configuration and a tokenizer of bytes; vLLM makes up the weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    names = ["<unk>", "<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet()]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def make_adapters(work: Path, layers: int, rank: int, count: int) -> None:
    """PEFT's adapters of all seven projections, registered, and in a folder as vLLM's resolver wants them."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator("cuda").manual_seed(1)
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    about |= {"base_model_name_or_path": "model", "target_modules": [name.split(".")[1] for name in MODULES]}
    subprocess.run([*LORA_FS, "init"], env={**os.environ, **registry_env(work)}, check=True, cwd=work)
    for number in range(count):
        weights = {}
        for layer in range(layers):
            for name, (inputs, outputs) in MODULES.items():
                at = f"base_model.model.model.layers.{layer}.{name}"
                for part, shape, size in (("A", (rank, inputs), inputs**-0.5), ("B", (outputs, rank), 0.02)):
                    drawn = torch.randn(shape, generator=draw, device="cuda") * size
                    weights[f"{at}.lora_{part}.weight"] = drawn.bfloat16().cpu()
        folder = work / "adapters" / f"a{number}"
        folder.mkdir(parents=True)
        save_file(weights, str(folder / "adapter_model.safetensors"))
        (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
        register = [*LORA_FS, "register", folder.name, str(folder)]
        subprocess.run(register, env={**os.environ, **registry_env(work)}, check=True, cwd=work)


def wait_ready(engines: Mapping[str, subprocess.Popen[bytes]], urls: Mapping[str, str]) -> dict[str, str]:
    """The URLs of those that answer. Prints which ended, and which do not answer in time."""
    waiting, ready, limit = dict(engines), {}, time.monotonic() + START_S
    while waiting and time.monotonic() < limit:
        for name, engine in list(waiting.items()):
            if engine.poll() is not None:
                print(f"{name} ended with {waiting.pop(name).returncode}: see its log")
                continue
            try:
                httpx.get(f"{urls[name]}/health", timeout=2).raise_for_status()
            except httpx.HTTPError:
                continue
            ready[name] = urls[name]
            del waiting[name]
        time.sleep(0.3)
    for name in waiting:
        print(f"{name} does not answer after {START_S} s")
    return {name: ready[name] for name in urls if name in ready}
