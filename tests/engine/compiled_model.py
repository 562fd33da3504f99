"""A vLLM of its own whose model is compiled piece by piece, as on a GPU. Prints answers and counts as JSON.

A script of ``test_compiled_model``. On a CPU vLLM compiles no model that has adapters, one of its passes
names operations that no CPU has, and a docstring of its CPU's is code to Python: that is changed here, and
nothing else. Arguments: the base model's folder, the prompts as JSON, then folders of adapters; without any
the base model alone is asked.
"""

from __future__ import annotations

import dataclasses
import json
import linecache
import sys
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.compilation.counter import compilation_counter
from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
from vllm.config import CompilationMode
from vllm.lora.punica_wrapper import punica_cpu
from vllm.platforms.cpu import CpuPlatform

sys.path.append(str(Path(__file__).parents[2]))

from tests.engine.batches import answers


def compile_models() -> None:
    """Let vLLM's CPU compile as its GPU does."""
    check = CpuPlatform.check_and_update_config.__func__

    def check_then_compile(cls: type[Any], config: Any) -> None:
        check(cls, config)
        compilation = config.compilation_config
        compilation.mode, compilation.backend = CompilationMode.VLLM_COMPILE, "inductor"
        compilation.compile_sizes = []

    setattr(CpuPlatform, "check_and_update_config", classmethod(check_then_compile))  # noqa: B010
    setattr(FixFunctionalizationPass, "__call__", lambda self, graph: None)  # noqa: B010
    # PyTorch reads the source of the generator expression in add_lora_linear. Python 3.11 looks upwards for
    # the line that begins it, and takes the docstring's "@ lora_b_stacked…" for one: vLLM 0.30 ends by that.
    source = linecache.getlines(str(punica_cpu.__file__))
    source[:] = [line.replace("    @ lora_", "    * lora_") for line in source]


def main(model_dir: str, prompts: str, *adapters: str) -> None:
    compile_models()
    llm = LLM(
        model_dir,
        dtype="float32",
        enable_lora=True,
        max_loras=2,
        max_lora_rank=16,
        max_model_len=32,
        max_num_batched_tokens=32,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
    )
    found = answers(llm, json.loads(prompts), adapters)
    print(json.dumps({"answers": found, "counts": dataclasses.asdict(compilation_counter)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
