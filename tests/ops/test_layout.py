"""Packing: what does not fit is named."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from lora_fs.kernels import backends, reference
from lora_fs.kernels.cpu import compiled, grouped
from lora_fs.kernels.weights.layout import Layer, Packed, Shape, ShapeError, pack

SHAPE = Shape(8, (4, 6))


def test_packing_keeps_the_numbers() -> None:
    """A's of the slices one under the other, B's on their sides."""
    a, b = torch.randn(2, 8), torch.randn(6, 2)
    packed = pack(SHAPE, [None, a], [None, b], scale=0.5)
    assert packed.ranks == (0, 2)
    assert packed.columns() == [(0, 0), (0, 2)]
    assert torch.equal(packed.a, a)
    assert packed.b[0] is None
    assert packed.b[1] is not None
    assert torch.equal(packed.b[1], b.T)


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        ([(2, 8)], [(4, 2)], "1 A and 1 B for a layer of 2 slices"),
        ([None, None], [None, None], "no slice has weights"),
        ([(2, 7), None], [(4, 2), None], r"A is \(2, 7\), and the layer wants \(2, 8\)"),
        ([(2, 8), None], [(4, 3), None], r"B of slice 0 is \(3, 4\), and the layer wants \(2, 4\)"),
        ([(2, 8), (3, 8)], [(4, 2), (4, 3)], r"B of slice 1 is \(3, 4\), and the layer wants \(3, 6\)"),
        ([(2, 8), None], [(4, 2), (6, 2)], r"B of slice 1 is \(2, 6\), and the layer wants None"),
    ],
)
def test_what_does_not_fit_is_named(
    a: list[tuple[int, int] | None], b: list[tuple[int, int] | None], told: str
) -> None:
    """The axis, what it is, and what was wanted."""
    with pytest.raises(ShapeError, match=told):
        pack(SHAPE, tensors(a), tensors(b))


def tensors(shapes: list[tuple[int, int] | None]) -> list[torch.Tensor | None]:
    return [None if shape is None else torch.zeros(shape) for shape in shapes]


def test_a_slot_takes_only_its_layers_weights() -> None:
    """And is as it was after a refusal."""
    layer = Layer.empty(SHAPE, 2)
    with pytest.raises(ShapeError, match="1 B for a layer of 2 slices"):
        layer.put(0, Packed(torch.zeros(2, 8), (torch.zeros(2, 4),), (2,)))
    assert layer.packed == [None, None]
    assert layer.widest == 0


def test_backends_by_name() -> None:
    """``auto`` is numba on a CPU; a third party's is found under its name."""
    assert backends.backend("reference", "cpu") is reference
    assert backends.backend("auto", "cpu") is compiled
    with pytest.raises(
        ValueError, match="there is no backend 'cuda'; there are: auto, numba, reference, torch"
    ):
        backends.backend("cuda", "cpu")
    with pytest.raises(ValueError, match="'torch' already"):
        backends.register("torch", "somebody.elses")


def test_a_numba_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``auto`` does without it, as where its release wants an older NumPy. A backend named raises."""

    def refuse(name: str) -> object:
        if name == "lora_fs.kernels.cpu.compiled":
            raise ImportError("Numba needs NumPy 2.4 or less. Got NumPy 2.5.")
        return import_module(name)

    monkeypatch.setattr(backends, "import_module", refuse)
    assert backends.backend("auto", "cpu") is grouped
    assert "Numba needs NumPy 2.4" in caplog.text
    with pytest.raises(ImportError, match="Numba needs"):
        backends.backend("numba", "cpu")


def test_a_third_partys_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported when it is asked for."""
    monkeypatch.setattr(backends, "_modules", dict(backends._modules))
    backends.register("mine", "lora_fs.kernels.reference")
    assert backends.backend("mine", "cpu") is reference
    assert "mine" in backends.names()
