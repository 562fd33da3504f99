"""Take the LoRA kernels of SGLang out of its wheel: the few files that import no more than torch and Triton.

    pack_peers.py FOLDER SGLANG_WHEEL

What those files import beside is replaced by a stand-in that says as much as they need at their import. A
machine without a network then has the peer on its PYTHONPATH, and nothing of it is kept in this project.
"""

from __future__ import annotations

import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

TAKEN = (
    "sglang/kernels/ops/lora/common/*.py",
    "sglang/kernels/ops/lora/dense/*.py",
    "sglang/kernels/ops/lora/dense/csgmv_configs/*.json",
    "sglang/kernels/ops/lora/moe/*.py",
    "sglang/srt/environ.py",
    "sglang/srt/lora/utils.py",
    "sglang/srt/lora/workspace.py",
    "sglang/srt/lora/dense/*.py",
    "sglang/srt/lora/dense/configs/*.json",
)
# Graphs are timed, so a launch's cost on the host, which the real decorator saves, does not count.
UTILS = """import torch

def cached_triton_kernel(key_fn=None):
    return lambda kernel: kernel

def get_device_name(device_id=0):
    return torch.cuda.get_device_name(device_id)
"""
# Sorts rows by adapter before anything is timed; the real one is compiled from CUDA.
ALIGN = """import torch

def moe_align_block_size(
    ids, buckets, block, sorted_ids, of_blocks, total, cumsum, pad_sorted_token_ids=False, **options
):
    shifted = ids.long() + 1
    padded = (torch.bincount(shifted, minlength=buckets) + block - 1) // block * block
    ends = padded.cumsum(0)
    order = shifted.argsort(stable=True)
    found = shifted[order]
    begins = torch.bincount(shifted, minlength=buckets).cumsum(0) - torch.bincount(shifted, minlength=buckets)
    places = (ends - padded)[found] + torch.arange(len(order), device=order.device) - begins[found]
    sorted_ids.fill_(ids.numel())
    sorted_ids[places] = order.to(sorted_ids.dtype)
    blocks = torch.arange(buckets, device=ids.device).repeat_interleave(padded // block) - 1
    of_blocks[: len(blocks)] = blocks.to(of_blocks.dtype)
    total[0] = ends[-1]

moe_align_single_token = None
"""
STANDINS = {
    "sglang/srt/utils/__init__.py": UTILS,
    "sglang/srt/utils/common.py": "def direct_register_custom_op(*given, **named):\n    pass\n",
    "sglang/srt/utils/hf_transformers_utils.py": "AutoConfig = object\n",
    "sglang/srt/model_executor/forward_batch_info.py": "ForwardBatch = object\n",
    "sglang/kernels/ops/moe/moe_align.py": ALIGN,
}


def main(folder: Path, wheel: Path) -> None:
    """Write the files and the stand-ins under ``folder``."""
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if any(fnmatch(name, pattern) for pattern in TAKEN) and not name.endswith("/"):
                files.extract(name, folder)
    for name, text in STANDINS.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
