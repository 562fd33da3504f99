"""What is kept of a kind says of the next one what looking at it anew would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_fs.sidecar.validate import Expectation, structure, validate
from lora_fs.sidecar.validate.report import Findings
from lora_fs.sidecar.validate.weights.header import TensorEntry, parse_header
from tests.validate.conftest import BASE_CONFIG, RANK, Draft, good_config, good_tensors, tensor_name

A = tensor_name("model.layers.0.self_attn.q_proj", "lora_A")
EXPECTED = Expectation(base_config=BASE_CONFIG, max_rank=RANK)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files whose headers were parsed; nothing is known at the beginning."""
    sizes: list[int] = []

    def counting(raw: bytes, size_bytes: int, file: str, found: Findings) -> tuple[TensorEntry, ...] | None:
        sizes.append(size_bytes)
        return parse_header(raw, size_bytes, file, found)

    monkeypatch.setattr(structure, "known", structure.Known())
    monkeypatch.setattr(structure, "parse_header", counting)
    return sizes


def test_the_next_of_a_kind(draft: Draft, parsed: list[int]) -> None:
    """Its header is not parsed again; the report is the same."""
    first = validate(draft.write(), EXPECTED)
    draft.tensors = {name: values * 2 for name, values in draft.tensors.items()}
    draft.config |= {"target_modules": ["v_proj", "q_proj"], "base_model_name_or_path": "acme/other"}
    second = validate(draft.write(), EXPECTED)
    assert len(parsed) == 1
    assert first.ok
    assert second.shape == first.shape
    assert (first.base_model, second.base_model) == ("acme/tiny-llama", "acme/other")


def test_its_weights_are_read(draft: Draft, parsed: list[int]) -> None:
    """What is wrong with the values of one is told, and not of the one before or after."""
    assert validate(draft.write(), EXPECTED).ok
    value, draft.tensors[A][1, 1] = draft.tensors[A][1, 1], np.nan
    assert [finding.code for finding in validate(draft.write(), EXPECTED).errors] == ["non-finite"]
    draft.tensors[A][1, 1] = value
    assert validate(draft.write(), EXPECTED).findings == ()
    assert len(parsed) == 1


def test_findings_are_told_each_time(draft: Draft, parsed: list[int]) -> None:
    """A kind with something to tell of is looked at anew, and told of as before."""
    draft.config["target_modules"] = ["q_proj", "v_proj", "o_proj"]
    first = validate(draft.write(), EXPECTED)
    assert [finding.code for finding in first.findings] == ["target-without-tensors"]
    assert validate(draft.write(), EXPECTED) == first
    assert len(parsed) == 2


def test_another_base_model(draft: Draft) -> None:
    """In order for one base model is not in order for another."""
    assert validate(draft.write(), EXPECTED).ok
    smaller = Expectation(base_config={**BASE_CONFIG, "num_hidden_layers": 1})
    assert {finding.code for finding in validate(draft.write(), smaller).errors} == {"no-such-module"}
    assert validate(draft.write(), EXPECTED).ok


def test_another_expectation(draft: Draft) -> None:
    """In order for one engine is not in order for another of less rank, or of another model."""
    folder = draft.write()
    assert validate(folder, EXPECTED).findings == ()
    told = [
        [finding.code for finding in validate(folder, expected).findings]
        for expected in (Expectation(max_rank=RANK - 1), Expectation(("acme/another-model",)), EXPECTED)
    ]
    assert told == [["rank-too-high"], ["base-model"], []]


def test_what_is_kept_is_bounded(draft: Draft, parsed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest kinds are kept, and none whose header is large."""
    for alpha in range(1, structure.KINDS_KEPT + 2):
        draft.config["lora_alpha"] = alpha
        assert validate(draft.write()).ok
    known = structure.known
    assert len(known.structures) == len(known.configs) == structure.KINDS_KEPT
    monkeypatch.setattr(structure, "MAX_KEPT_BYTES", 10)
    before = {*known.structures}, {*known.configs}
    draft.config["lora_alpha"] = 1000
    assert validate(draft.write()).ok
    assert ({*known.structures}, {*known.configs}) == before


CONFIGS: Mapping[str, Any] = {
    "r": [RANK, RANK * 2, True, "4"],
    "lora_alpha": [8, 8.0, 16, 0],
    "use_rslora": [False, True, None],
    "target_modules": [
        ["q_proj", "v_proj"],
        ["v_proj", "q_proj"],
        ["q_proj"],
        ["q_proj", "v_proj", "o_proj"],
        ".*_proj",
        "all-linear",
        "(a+)+",
    ],
    "target_parameters": [None, ["x"]],
    "rank_pattern": [{}, {"q_proj": RANK}, {"q_proj": 1}, {"v_proj": RANK}],
    "alpha_pattern": [{}, {"q_proj": 1}],
    "modules_to_save": [None, ["score"], ["lm_head"]],
    "peft_type": ["LORA", None],
}


CHANGES = [(name, value) for name, values in CONFIGS.items() for value in values]


@given(
    configs=st.lists(st.lists(st.sampled_from(CHANGES), max_size=2).map(dict), min_size=2, max_size=6),
    bases=st.lists(st.sampled_from([None, BASE_CONFIG, {**BASE_CONFIG, "hidden_size": 16}]), min_size=1),
    changes=st.lists(st.sampled_from(["", "half", "rank", "module", "zero"]), min_size=1),
)
@example(
    configs=[{"target_parameters": ["x"], "target_modules": ["q_proj"]}, {"target_modules": ["q_proj"]}],
    bases=[None],
    changes=[""],
)
def test_as_if_nothing_were_kept(
    tmp_path_factory: pytest.TempPathFactory,
    configs: list[dict[str, object]],
    bases: list[Mapping[str, object] | None],
    changes: list[str],
) -> None:
    """Whatever was validated before, a report is what a process that knows nothing gives."""
    folder = tmp_path_factory.mktemp("kinds")
    structure.known = structure.Known()
    for number, config in enumerate(configs):
        draft = Draft(folder / str(number))
        draft.config, draft.tensors = good_config() | config, good_tensors()
        change(draft, changes[number % len(changes)])
        expected = Expectation(base_config=bases[number % len(bases)], max_rank=RANK)
        written = draft.write()
        report, again = validate(written, expected), validate(written, expected)
        kept, structure.known = structure.known, structure.Known()
        assert report == again == validate(written, expected)
        structure.known = kept


def change(draft: Draft, what: str) -> None:
    """Break the weights in one place."""
    if what == "half":
        del draft.tensors[A]
    elif what == "rank":
        draft.tensors[A] = draft.tensors[A][1:]
    elif what == "module":
        draft.tensors[A.replace("q_proj", "k_proj")] = draft.tensors.pop(A)
    elif what == "zero":
        draft.tensors[A] *= 0
