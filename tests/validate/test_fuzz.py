"""Whatever bytes stand in the files, validation answers; damaged bytes never pass."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_fs.sidecar.validate import Expectation, looks_preallocated, validate
from tests.validate.conftest import (
    BASE_CONFIG,
    CONFIG_FILE,
    WEIGHTS_FILE,
    Draft,
    good_config,
    good_tensors,
    raw_safetensors,
    safetensors_bytes,
)

GOOD = safetensors_bytes(good_tensors())
HEADER_END = 8 + struct.unpack("<Q", GOOD[:8])[0]
KNOWN = Expectation(model_ids=("acme/tiny-llama",), base_config=BASE_CONFIG, max_rank=16)
fuzz = settings(max_examples=150)

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 99), min_size=2, max_size=2) | json_values,
    }
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One good adapter for all examples: each writes what it changes."""
    with tempfile.TemporaryDirectory() as name:
        yield Draft(Path(name)).write()


def judge(folder: Path, config: bytes | None = None, weights: bytes | None = None) -> bool:
    """Write the files, good where not given, and validate them."""
    (folder / CONFIG_FILE).write_bytes(json.dumps(good_config()).encode() if config is None else config)
    (folder / WEIGHTS_FILE).write_bytes(GOOD if weights is None else weights)
    looks_preallocated(folder)
    report = validate(folder, KNOWN)
    for finding in report.findings:
        assert finding.render().isprintable()
    return report.ok


@fuzz
@given(data=st.binary(max_size=300))
def test_random_bytes(folder: Path, data: bytes) -> None:
    """Random bytes are neither a config nor weights."""
    assert not judge(folder, config=data)
    assert not judge(folder, weights=data)


@fuzz
@given(length=st.integers(0, len(GOOD) - 1))
def test_every_truncation(folder: Path, length: int) -> None:
    """No proper prefix of the weights passes."""
    assert not judge(folder, weights=GOOD[:length])


@pytest.mark.parametrize("length", [*range(17), HEADER_END - 1, HEADER_END, HEADER_END + 1])
def test_truncation_at_a_boundary(folder: Path, length: int) -> None:
    """The same at the edges of the length and of the header, and of the whole file."""
    assert not judge(folder, weights=GOOD[:length])
    assert not judge(folder, weights=GOOD[: len(GOOD) - 1 - length % 17])


@fuzz
@given(extra=st.binary(min_size=1, max_size=50))
def test_every_appendix(folder: Path, extra: bytes) -> None:
    """Bytes behind the last tensor do not pass."""
    assert not judge(folder, weights=GOOD + extra)


@fuzz
@given(header=st.dictionaries(st.text(max_size=12), entries | json_values, max_size=4))
def test_random_headers(folder: Path, header: dict[str, object]) -> None:
    """A header of the right form and wrong content is answered, and does not pass."""
    assert not judge(folder, weights=raw_safetensors(header, bytes(64)))


@fuzz
@given(at=st.integers(0, HEADER_END - 1), byte=st.integers(0, 255))
def test_one_byte_of_the_header(folder: Path, at: int, byte: int) -> None:
    """One changed byte of the header is answered, whatever it makes of it."""
    judge(folder, weights=GOOD[:at] + bytes([byte]) + GOOD[at + 1 :])


@fuzz
@given(
    field=st.sampled_from(
        sorted(
            {
                *good_config(),
                "rank_pattern",
                "modules_to_save",
                "use_dora",
                "alpha_pattern",
                "use_rslora",
                "init_lora_weights",
                "target_parameters",
            }
        )
    ),
    value=json_values,
)
def test_one_field_of_the_config(folder: Path, field: str, value: object) -> None:
    """Any JSON value in any field is answered."""
    judge(folder, config=json.dumps(good_config() | {field: value}).encode())


@fuzz
@given(config=json_values)
def test_random_configs(folder: Path, config: object) -> None:
    """JSON that is no adapter's config does not pass."""
    assert not judge(folder, config=json.dumps(config).encode())


def test_nesting_around_the_parsers_limit(folder: Path) -> None:
    """JSON nested just less than the parser can read is refused, not fatal to who prints it."""
    for depth in range(900, 1000):
        nested = "[" * depth + "]" * depth
        assert not judge(folder, config=f'{{"r": {nested}}}'.encode())
        assert not judge(folder, weights=raw_safetensors(f'{{"a": {nested}}}'.encode(), b""))
