"""The weights' bytes: what is garbage, what does nothing, what has not arrived."""

from __future__ import annotations

import numpy as np
import pytest

from lora_fs.sidecar.validate import looks_preallocated, validate
from tests.validate.conftest import (
    HIDDEN,
    RANK,
    WEIGHTS_FILE,
    Draft,
    tensor_name,
)

A = tensor_name("model.layers.0.self_attn.q_proj", "lora_A")
# bfloat16's bits: one, the largest below 65,536, that, the largest finite, NaN, Inf, -Inf
ONE, LARGE, HUGE, LARGEST, NAN, INF, MINUS_INF = 0x3F80, 0x477F, 0x4780, 0x7F7F, 0x7FC0, 0x7F80, 0xFF80


def with_bits(draft: Draft, bits: int) -> Draft:
    """Make every tensor bfloat16 ones, and one element these bits."""
    draft.tensors = {name: np.full(values.shape, ONE, np.uint16) for name, values in draft.tensors.items()}
    draft.tensors[A][2, 5] = bits
    return draft


@pytest.mark.parametrize("bits", [NAN, INF, MINUS_INF, 0x7F81, 0xFFFF])
def test_bfloat16_garbage(draft: Draft, bits: int) -> None:
    """NaN and Inf are seen in bfloat16, which numpy has no type for, and located."""
    (finding,) = validate(with_bits(draft, bits).write()).errors
    assert finding.code == "non-finite"
    assert finding.field == A
    assert f"element {2 * HIDDEN + 5}" in finding.message


@pytest.mark.parametrize("bits", [HUGE, LARGEST, HUGE | 0x8000])
def test_bfloat16_that_overflows(draft: Draft, bits: int) -> None:
    """What float16 cannot hold is told apart from NaN, and located."""
    (finding,) = validate(with_bits(draft, bits).write()).errors
    assert (finding.code, finding.field) == ("overflow", A)
    assert f"element {2 * HIDDEN + 5}" in finding.message


@pytest.mark.parametrize("value", [65536.0, -1e30])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_wide_floats_that_overflow(draft: Draft, value: float, dtype: type[np.floating]) -> None:
    """So is it in the wider types; 65,535 is a value."""
    draft.tensors = {name: values.astype(dtype) for name, values in draft.tensors.items()}
    draft.tensors[A][0, 0] = 65535
    assert "overflow" not in {finding.code for finding in validate(draft.write()).findings}
    draft.tensors[A][0, 0] = value
    assert "overflow" in {finding.code for finding in validate(draft.write()).errors}


@pytest.mark.parametrize("bits", [LARGE, 0x0000, 0x8000, 0x0001])
def test_bfloat16_values(draft: Draft, bits: int) -> None:
    """A large one, zero, minus zero and a subnormal are values; the dtype is told by its name."""
    report = validate(with_bits(draft, bits).write())
    assert report.findings == ()
    assert report.shape is not None
    assert report.shape.dtype == "bfloat16"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_float16_garbage(draft: Draft, value: float) -> None:
    """NaN and Inf are seen in float16."""
    draft.tensors = {name: values.astype(np.float16) for name, values in draft.tensors.items()}
    draft.tensors[A][0, 0] = value
    assert [finding.code for finding in validate(draft.write()).errors] == ["non-finite"]


def test_float16_largest(draft: Draft) -> None:
    """65504 is a float16 like any other."""
    draft.tensors = {name: values.astype(np.float16) for name, values in draft.tensors.items()}
    draft.tensors[A][0, 0] = 65504
    assert validate(draft.write()).findings == ()


def test_garbage_beyond_the_first_buffer(draft: Draft) -> None:
    """A tensor larger than the read buffer is read to its end, and the element is counted right."""
    large = np.ones((RANK, 300_000), np.float32)
    large[3, 299_999] = np.nan
    draft.tensors[A] = large
    (finding,) = validate(draft.write()).errors
    assert f"element {large.size - 1}" in finding.message


def test_untrained_adapter_is_told(draft: Draft) -> None:
    """An adapter whose every lora_B is zero passes, with the warning that it does nothing."""
    for name in draft.tensors:
        if "lora_B" in name:
            draft.tensors[name][:] = 0
    report = validate(draft.write())
    assert report.ok
    assert [finding.code for finding in report.findings] == ["zero-weights"]


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_preallocated_copy(draft: Draft, kept: float) -> None:
    """A file of full size whose end has not arrived is told from a finished one."""
    path = draft.write() / WEIGHTS_FILE
    assert not looks_preallocated(draft.folder)
    data = path.read_bytes()
    arrived = int(len(data) * kept)
    path.write_bytes(data[:arrived] + bytes(len(data) - arrived))
    assert looks_preallocated(draft.folder)


def test_preallocated_from_the_first_byte(draft: Draft) -> None:
    """A file of zeros alone has not begun to arrive; no file at all is not a copy under way."""
    path = draft.write() / WEIGHTS_FILE
    path.write_bytes(bytes(path.stat().st_size))
    assert looks_preallocated(draft.folder)
    path.unlink()
    assert not looks_preallocated(draft.folder)


def test_padded_rank_is_not_a_copy_under_way(draft: Draft) -> None:
    """An adapter padded to a larger rank ends every lora_A in zeros: that is how it is meant."""
    for name, values in draft.tensors.items():
        if "lora_A" in name:
            values[RANK // 2 :] = 0
    assert not looks_preallocated(draft.write())
    assert validate(draft.folder).findings == ()
