"""The implementations of the operations, by name.

``reference`` is the definition, ``numba`` and ``torch`` are for CPUs, ``triton`` for GPUs; ``auto`` takes
what fits the device. Anybody can add one: ``register("mine", "my.module")``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

import torch

from lora_fs.kernels.segments import Plan
from lora_fs.kernels.weights.layout import Layer

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """What a backend's module defines; ``reference`` says what each computes.

    One that compiles, or reads weights of other types than the engine's, defines ``warm_up`` as well.
    """

    def linear(
        self, y: torch.Tensor, x: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True
    ) -> None: ...

    def embedding(
        self, y: torch.Tensor, tokens: torch.Tensor, layer: Layer, plan: Plan, *, add: bool = True
    ) -> None: ...


_modules = {
    "reference": "lora_fs.kernels.reference",
    "numba": "lora_fs.kernels.cpu.compiled",
    "torch": "lora_fs.kernels.cpu.grouped",
    "triton": "lora_fs.kernels.gpu",
}


def register(name: str, module: str) -> None:
    """Register a module as a backend; its first use imports it.

    Raises:
        ValueError: another backend has the name.
    """
    if name in {*_modules, "auto"}:
        raise ValueError(f"there is a backend {name!r} already")
    _modules[name] = module


def backend(name: str, device: torch.device | str) -> Backend:
    """Find a backend.

    Args:
        name: one of ``names()``, or ``auto``: on a CPU ``numba``, or ``torch`` where that cannot be imported.
    Raises:
        ValueError: there is none of this name; says which there are.
    """
    if name == "auto" and torch.device(device).type == "cpu":
        try:
            return cast(Backend, import_module(_modules["numba"]))
        except ImportError as error:
            logger.warning("the loops cannot be imported, so torch's products are used: %s", error)
            name = "torch"
    elif name == "auto":
        name = "triton"
    if name not in _modules:
        raise ValueError(f"there is no backend {name!r}; there are: auto, {', '.join(names())}")
    return cast(Backend, import_module(_modules[name]))


def names() -> list[str]:
    """The names of all backends."""
    return sorted(_modules)


def warm_up(ops: Backend, rows: torch.dtype) -> frozenset[torch.dtype]:
    """Have a backend made ready, when the engine starts, for rows of a type.

    Returns: the types of weights that it reads as they are.
    """
    own: Callable[[torch.dtype], frozenset[torch.dtype]] | None = getattr(ops, "warm_up", None)
    return frozenset() if own is None else own(rows)
