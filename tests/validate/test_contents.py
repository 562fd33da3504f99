"""The weights' bytes: what is garbage, what does nothing, what has not arrived."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.validate import Expectation, looks_preallocated, validate
from lora_fs.sidecar.validate.weights import contents
from tests.validate.conftest import (
    HIDDEN,
    RANK,
    WEIGHTS_FILE,
    Draft,
    good_config,
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


@pytest.mark.parametrize("rows", [slice(0, RANK // 2), slice(RANK // 2, RANK)], ids=["head", "tail"])
def test_a_hole_in_one_tensor(draft: Draft, rows: slice) -> None:
    """One lora_A that begins, or ends, in zeros where the others do not has not arrived."""
    draft.tensors[A][rows] = 0
    assert looks_preallocated(draft.write())


def test_a_hole_beside_tensors_that_end_in_zeros(draft: Draft) -> None:
    """That all lora_A end in zeros excuses no zeros at the head of one of them."""
    for name, values in draft.tensors.items():
        if "lora_A" in name:
            values[RANK // 2 :] = 0
    draft.tensors[A][: RANK // 2] = 0
    assert looks_preallocated(draft.write())


def test_a_hole_in_the_only_tensor(draft: Draft) -> None:
    """Of one lora_A that ends in zeros nothing tells that it is meant so."""
    draft.tensors = {name: draft.tensors[name] for name in (A, A.replace("lora_A", "lora_B"))}
    draft.tensors[A][RANK // 2 :] = 0
    assert looks_preallocated(draft.write())


def test_a_file_that_ends_in_another_tensor_than_a_lora_b(draft: Draft) -> None:
    """The last lora_B may then be zero: whatever comes after it has arrived."""
    last = next(name for name in reversed(draft.tensors) if "lora_B" in name)
    draft.tensors[last][:] = 0
    draft.tensors[A] = draft.tensors.pop(A)
    assert not looks_preallocated(draft.write())


def test_padded_rank_is_not_a_copy_under_way(draft: Draft) -> None:
    """An adapter padded to a larger rank ends every lora_A in zeros: that is how it is meant."""
    for name, values in draft.tensors.items():
        if "lora_A" in name:
            values[RANK // 2 :] = 0
    assert not looks_preallocated(draft.write())
    assert validate(draft.folder).findings == ()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_minus_zeros_do_nothing_either(draft: Draft, dtype: type[np.floating]) -> None:
    """A lora_B of minus zeros is zero in every dtype."""
    draft.tensors = {name: values.astype(dtype) for name, values in draft.tensors.items()}
    for name, values in draft.tensors.items():
        if "lora_B" in name:
            values[:] = -0.0
    findings = validate(draft.write()).findings
    assert [one.code for one in findings if one.code != "dtype"] == ["zero-weights"]


B = tensor_name("model.layers.0.self_attn.q_proj", "lora_B")
NUMBERS = {
    "float16": (np.uint16, np.float16),
    "float32": (np.uint32, np.float32),
    "float64": (np.uint64, np.float64),
}


@pytest.mark.parametrize("scale", [1.0, 2.0, -3.0, 0.3, 1e4, 7e15, 8e37])
@pytest.mark.parametrize("dtype", [*NUMBERS, "bfloat16"])
@pytest.mark.parametrize("size", [64, contents.BUFFER_BYTES])
def test_what_the_scale_makes_of_weights(
    draft: Draft, scale: float, dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lora_B is held against float16 as vLLM multiplies it, to the last bit; lora_A is not multiplied."""
    monkeypatch.setattr(contents, "BUFFER_BYTES", size)
    draft.config["lora_alpha"] = scale * RANK
    least = 65536 / max(1.0, abs(scale))
    bits, kind = NUMBERS.get(dtype, NUMBERS["float32"])
    dropped = 16 if dtype == "bfloat16" else 0  # its low half
    with np.errstate(over="ignore"):
        near = int(np.array(least).astype(kind).view(bits)) >> dropped
    stored = np.uint16 if dropped else bits
    shapes = {name: values.shape for name, values in draft.tensors.items()}
    for pattern in range(max(0, near - 2), near + 4):
        value = float(np.array(pattern << dropped, bits).view(kind))
        written = {name: np.zeros(shape, stored) for name, shape in shapes.items()}
        written[A][2, 3] = written[B][2, 3] = pattern
        draft.tensors = {name: values.view(stored if dropped else kind) for name, values in written.items()}
        told = [one.field for one in validate(draft.write()).errors if one.code != "dtype"]
        expected = {A: not value < 65536, B: not value < least}
        assert told == [name for name in expected if expected[name]], (value, least)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_scale_is_vllms(draft: Draft, rslora: bool) -> None:
    """It is alpha / r, or alpha / sqrt(r); alpha_pattern says others, and is no detail."""
    draft.config |= {"use_rslora": rslora}
    for values in draft.tensors.values():
        values[:] = 1.0
    divisor = RANK**0.5 if rslora else RANK

    def overflowing() -> list[str]:
        return [one.field for one in validate(draft.write()).errors if one.code == "overflow"]

    draft.config["lora_alpha"] = 65535 * divisor
    assert overflowing() == []
    draft.config["lora_alpha"] = 65536 * divisor
    assert overflowing() == [name for name in draft.tensors if "lora_B" in name]
    draft.config["alpha_pattern"] = {"v_proj": 8, r"layers\.0\.self_attn\.q_proj": 8}
    assert overflowing() == [tensor_name("model.layers.1.self_attn.q_proj", "lora_B")]
    draft.config["alpha_pattern"] = {"[qv]_proj": 8}
    assert overflowing() == []
    draft.config["alpha_pattern"] = {"q_proj": 8}
    assert overflowing() == [tensor_name(f"model.layers.{n}.self_attn.v_proj", "lora_B") for n in range(2)]


def test_a_scale_that_is_no_float32(draft: Draft) -> None:
    """It is told once and of the configuration, for it makes NaN of zeros, too; who allows it is warned."""
    for name, values in draft.tensors.items():
        if "lora_B" in name:
            values[:] = 0
    for fields in ({"lora_alpha": 1e308}, {"lora_alpha": -(10**39)}, {"alpha_pattern": {"q_proj": 1e39}}):
        draft.config = good_config() | fields
        (finding,) = validate(draft.write(), contents=False).errors
        assert (finding.code, finding.file) == ("overflow", "adapter_config.json")
        assert [one.code for one in validate(draft.folder).errors] == ["overflow"]
        report = validate(draft.folder, Expectation(allow=frozenset({"overflow"})))
        assert report.ok
        assert report.shape is not None


VALUES = [0.0, -0.0, 1.0, 65535.0, 65536.0, np.inf, np.nan, 1e-45]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([np.float16, np.float32, np.float64]),
            st.integers(1, 40),
            st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(VALUES)), max_size=3),
            st.sampled_from([0.0, 1.0]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_wherever_a_read_begins_and_ends(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[type[np.floating], int, list[tuple[int, float]], float]],
) -> None:
    """What is told of a tensor depends on its elements alone, not on those it is read with."""
    draft = Draft(tmp_path_factory.mktemp("adapter"))
    draft.tensors, expected = {}, {}
    with np.errstate(all="ignore"):
        for number, (dtype, width, odd, value) in enumerate(tensors):
            name = tensor_name(f"model.layers.{number}.self_attn.q_proj", "lora_A")
            values = np.full((RANK, width), value, dtype)
            for at, other in odd:
                values.flat[at % values.size] = other
            draft.tensors[name] = values
            ended = np.flatnonzero(~np.isfinite(values))
            large = np.flatnonzero(~(np.abs(values.astype(np.float64)) < 65536))
            if len(ended):
                expected[name] = ("non-finite", ended[0])
            elif len(large):
                expected[name] = ("overflow", large[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contents, "BUFFER_BYTES", 64)
        findings = validate(draft.write()).findings
    told = [f for f in findings if f.code in ("non-finite", "overflow")]
    assert {f.field: (f.code, int(f.message.rsplit(" ", 1)[1])) for f in told} == expected


def test_zeros_are_told_of_each_tensor(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read together or in parts, a lora_A is zero if all its elements are, minus zero too."""
    names = [name for name in draft.tensors if "lora_A" in name]
    for name, last in zip(names, (0.0, -0.0, 1e-45, 1.0), strict=True):
        draft.tensors[name][:] = last if not last else 0
        draft.tensors[name][-1, -1] = last
    folder = draft.write()
    for size in (64, contents.BUFFER_BYTES):
        monkeypatch.setattr(contents, "BUFFER_BYTES", size)
        findings = validate(folder).findings
        assert [f.field for f in findings if f.code == "zero-weights"] == names[:2]
