"""Takes the place of vLLM's compiled operations (``vllm._C_stable_libtorch``) where there are none.

Each one here is what a Llama in bf16 with adapters asks for, in torch. All others stay absent, so that
``hasattr(torch.ops._C, …)`` tells the truth. Source: the schemas of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def _define(schema: str, run: Callable[..., Any], key: str = "CompositeExplicitAutograd") -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], run, key)


def _normalized(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    y = x.float()
    y = (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)
    return y if weight is None else y * weight


def _rms_norm(result: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, epsilon: float) -> None:
    result.copy_(_normalized(x, weight, epsilon))


def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float
) -> None:
    residual.add_(x)
    x.copy_(_normalized(residual, weight, epsilon))


def _silu_and_mul(result: torch.Tensor, x: torch.Tensor) -> None:
    half = x.shape[-1] // 2
    torch.mul(torch.nn.functional.silu(x[..., :half]), x[..., half:], out=result)


def _apply_repetition_penalties(
    logits: torch.Tensor, of_prompt: torch.Tensor, of_output: torch.Tensor, penalties: torch.Tensor
) -> None:
    each = torch.where(of_prompt | of_output, penalties.unsqueeze(1), 1.0)
    logits.mul_(torch.where(logits > 0, 1.0 / each, each))


# Asked when modules of quantisation are imported.
for _name in ("scaled_mm_supports_fp8", "scaled_mm_supports_block_fp8", "group_gemm_supported"):
    _define(
        f"cutlass_{_name}(int cuda_device_capability) -> bool", lambda _: False, "CompositeImplicitAutograd"
    )
_define("rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", _rms_norm)
_define(
    "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
    _fused_add_rms_norm,
)
_define("silu_and_mul(Tensor! result, Tensor input) -> ()", _silu_and_mul)
_define(
    "apply_repetition_penalties_(Tensor! logits, Tensor prompt_mask, Tensor output_mask, "
    "Tensor repetition_penalties) -> ()",
    _apply_repetition_penalties,
)


class _Memory:
    """Memory that something else owns, as ``torch.as_tensor`` takes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        begin = tensor.storage_offset() * tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": (tensor.untyped_storage().nbytes() - begin,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def _on_the_device(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the device's, which keeps nothing alive."""
    raw = torch.as_tensor(_Memory(tensor), device="cuda")
    raw = raw[: raw.numel() // tensor.element_size() * tensor.element_size()]
    return raw.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), 0)


def _weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """What a CUDA graph returns lies in the graph's own pool."""
    return _on_the_device(tensor) if tensor.is_cuda else tensor.detach()


# Views of page-locked memory keep it for ever.
_VIEWED: list[torch.Tensor] = []


def _get_cuda_view_from_cpu_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Page-locked memory has the same address on the device."""
    if not tensor.is_pinned():
        return tensor
    _VIEWED.append(tensor)
    return _on_the_device(tensor)


# Functions of the namespace and no operations, which may not return what they were given.
torch.ops._C.weak_ref_tensor = _weak_ref_tensor
torch.ops._C.get_cuda_view_from_cpu_tensor = _get_cuda_view_from_cpu_tensor
