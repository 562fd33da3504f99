"""Packs adapters whose files differ only in the weights alike, and parses only the first.

vLLM's reader and the checks after it hold the interpreter's lock, some milliseconds for 100 tensors, and
the step waits for it. All of that depends on the file's header and on the configuration alone. So this
module keeps the result for the first of a kind, as places in the file, and copies the others from there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

import torch

from lora_fs.kernels.weights.slabs import Draft, Outline, Strided
from lora_fs.worker_patch.worker.load.resident import Resident

Tensors = Mapping[str, torch.Tensor]

KINDS_KEPT = 16
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_LENGTH_BYTES = 8
_NAMES_THE_BASE = ("base_model_name_or_path", "revision")  # which vLLM does not read


class Kind(NamedTuple):
    """What two adapters of a kind have in common: the header, its file's size, the configuration."""

    header: bytes
    size_bytes: int
    config: str

    @classmethod
    def of(cls, folder: str) -> Kind | None:
        """The kind of an adapter; None if only vLLM's reader can judge it."""
        weights = os.path.join(folder, WEIGHTS)
        if not os.path.isfile(weights):
            return None
        try:
            with open(weights, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                if length > size:
                    return None
                header = file.read(length)
            with open(os.path.join(folder, CONFIG), "rb") as file:
                return cls(header, size, _told(file.read()))
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    @property
    def has_fused_experts(self) -> bool:
        """Whether it keeps all experts of a layer in one tensor, as PEFT's ``target_parameters`` do."""
        return re.search(rb"\.experts(\.base_layer)?\.lora_A\.", self.header) is not None

    @property
    def digest(self) -> bytes:
        """The kind's short name: a header may have 100 MB."""
        found = blake2b(self.begin.to_bytes(8) + self.size_bytes.to_bytes(8))
        found.update(self.header)
        found.update(self.config.encode())
        return found.digest()

    @property
    def begin(self) -> int:
        """Where in the file the weights begin, in bytes."""
        return _LENGTH_BYTES + len(self.header)


@lru_cache(KINDS_KEPT)
def _told(config: bytes) -> str:
    """The parts of a configuration that vLLM reads."""
    told = json.loads(config)
    for name in _NAMES_THE_BASE:
        told.pop(name, None)
    if isinstance(told.get("target_modules"), list):  # a set, which PEFT writes in any order
        told["target_modules"].sort()
    return json.dumps(told)


class Span(NamedTuple):
    """A matrix in a file, counted from the file's beginning."""

    dtype: torch.dtype
    place: Strided


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to pack adapters of a kind, from files of ``size_bytes``; ``spans`` as ``Draft.sources``."""

    rank: int
    outline: Outline
    dtype: torch.dtype
    size_bytes: int
    spans: tuple[Span, ...]

    def draft(self, folder: str) -> Draft:
        """The same of another file, which is not read yet: packing does that."""
        file = torch.from_file(os.path.join(folder, WEIGHTS), size=self.size_bytes, dtype=torch.uint8)
        typed = {}
        for dtype in {span.dtype for span in self.spans}:
            typed[dtype] = file[: len(file) // dtype.itemsize * dtype.itemsize].view(dtype)
        sources = tuple(typed[dtype].as_strided(*place) for dtype, place in self.spans)
        return Draft(self.outline, self.dtype, sources)


class Alike:
    """The latest ``KINDS_KEPT`` kinds; any thread may ask."""

    def __init__(self) -> None:
        self._recipes: dict[bytes, Recipe] = {}  # by the kind's digest

    def recipe(self, kind: Kind | None) -> Recipe | None:
        """How to pack this kind, if it has packed one."""
        return None if kind is None else self._recipes.get(kind.digest)

    def learn(self, folder: str, kind: Kind, resident: Resident, tensors: Tensors, draft: Draft) -> None:
        """Keep how an adapter was packed, unless the packing computed anything, in place or not.

        Checks where the sources lie and that nobody wrote to them, and packs the adapter so again.

        Args:
            tensors: by the header's names, as the reader had them.
            draft: the packed one.
        """
        if resident.loras or resident.modules_to_save:
            return
        if spans := _spans(kind, tensors, draft):
            recipe = Recipe(resident.rank, draft.outline, draft.dtype, kind.size_bytes, spans)
            if recipe.draft(folder).is_in(resident.slab):
                self._recipes = dict(list({**self._recipes, kind.digest: recipe}.items())[-KINDS_KEPT:])


def _spans(kind: Kind, tensors: Tensors, draft: Draft) -> tuple[Span, ...] | None:
    """Where a draft's sources are in the file; None if one of them is elsewhere, or may have changed."""
    if any(tensor.is_inference() or tensor._version for tensor in tensors.values()):
        return None
    told = json.loads(kind.header)
    begins = {tensor.data_ptr() - told[name]["data_offsets"][0] for name, tensor in tensors.items()}
    if len(begins) != 1:
        return None
    file = begins.pop() - kind.begin
    spans = []
    for source in draft.sources:
        offset, rest = divmod(source.data_ptr() - file, source.itemsize)
        length = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
        if rest or not kind.begin <= offset * source.itemsize <= kind.size_bytes - length * source.itemsize:
            return None
        spans.append(Span(source.dtype, Strided(tuple(source.shape), source.stride(), offset)))
    return tuple(spans)
