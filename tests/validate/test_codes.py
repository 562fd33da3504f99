"""Every finding code has a case here that makes it, and none that is good makes any error."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate import CODES, Expectation, validate
from lora_fs.sidecar.validate.config.patterns import Budget
from lora_fs.sidecar.validate.weights import tensors as weights_tensors
from tests.validate.conftest import (
    BASE_CONFIG,
    CONFIG_FILE,
    HIDDEN,
    KV,
    RANK,
    WEIGHTS_FILE,
    Draft,
    good_config,
    raw_safetensors,
    safetensors_bytes,
    tensor_name,
)

Q0 = "model.layers.0.self_attn.q_proj"
KNOWN = Expectation(
    model_ids=("acme/tiny-llama", "tiny", "/models/tiny-llama"),
    base_config=BASE_CONFIG,
    max_rank=16,
)
CASES: list[tuple[str, str, Callable[[Draft], None]]] = []


def case(code: str, name: str) -> Callable[[Callable[[Draft], None]], Callable[[Draft], None]]:
    """Register a way to break a good adapter, and the code it must be given."""

    def register(breaks: Callable[[Draft], None]) -> Callable[[Draft], None]:
        CASES.append((code, name, breaks))
        return breaks

    return register


def config_case(code: str, name: str, **fields: object) -> None:
    """Register a config that differs in some fields; a value of ... removes the field."""

    @case(code, name)
    def breaks(draft: Draft) -> None:
        draft.config |= fields
        draft.config = {key: value for key, value in draft.config.items() if value is not ...}
        draft.write()


def config_text(code: str, name: str, text: str | bytes) -> None:
    """Register a config file with exactly this content."""

    @case(code, name)
    def breaks(draft: Draft) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        (draft.write() / CONFIG_FILE).write_bytes(data)


def weights_case(code: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Register a change to the bytes of the weights file."""

    @case(code, name)
    def breaks(draft: Draft) -> None:
        path = draft.write() / WEIGHTS_FILE
        path.write_bytes(change(path.read_bytes()))


def header_case(code: str, name: str, header: object, data: bytes = b"") -> None:
    """Register a weights file made of this header and these bytes."""
    weights_case(code, name, lambda _: raw_safetensors(header, data))


def tensor_case(code: str, name: str, change: Callable[[Draft], None]) -> None:
    """Register a change to the tensors."""

    @case(code, name)
    def breaks(draft: Draft) -> None:
        change(draft)
        draft.write()


def files_case(code: str, name: str, change: Callable[[Path], object]) -> None:
    """Register a change to the files of a good adapter."""

    @case(code, name)
    def breaks(draft: Draft) -> None:
        change(draft.write())


def entry(**changes: object) -> dict[str, object]:
    """Make a header's entry of one tensor of 16 bytes, with changes."""
    good = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    return good | changes


def lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def rename(draft: Draft, old: str, new: str) -> None:
    draft.tensors = {name.replace(old, new): values for name, values in draft.tensors.items()}


def replace(draft: Draft, part: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
    draft.tensors[tensor_name(Q0, part)] = values


def drop(draft: Draft, part: str) -> None:
    del draft.tensors[tensor_name(Q0, part)]


def spoil(draft: Draft, value: float) -> None:
    draft.tensors[tensor_name(Q0, "lora_B")][3, 1] = value


# the folder and its files
files_case("missing-folder", "no folder", lambda folder: folder.rename(folder.with_name("other")))
files_case("missing-config", "no config", lambda folder: (folder / CONFIG_FILE).unlink())
files_case("missing-weights", "no weights", lambda folder: (folder / WEIGHTS_FILE).unlink())
files_case(
    "sharded-weights",
    "two shards",
    lambda folder: (folder / WEIGHTS_FILE).rename(folder / "adapter_model-00001-of-00002.safetensors"),
)
files_case(
    "pickle",
    "only a pickle",
    lambda folder: (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin"),
)
files_case(
    "unserved-weights",
    "a pickle beside the weights",
    lambda folder: (folder / "adapter_model.bin").write_bytes(b"pickle"),
)
files_case("lfs-pointer", "weights", lambda folder: lfs_pointer(folder / WEIGHTS_FILE))
files_case("lfs-pointer", "config", lambda folder: lfs_pointer(folder / CONFIG_FILE))
files_case(
    "added-tokens",
    "new embeddings",
    lambda folder: (folder / "new_embeddings.safetensors").write_bytes(b"x"),
)
weights_case("unfinished-copy", "all zero", lambda data: bytes(len(data)))

# adapter_config.json
config_text("config-json", "empty", "")
config_text("config-json", "not JSON", "{r: 8}")
config_text("config-json", "a list", "[]")
config_text("config-json", "NaN", '{"r": 4, "lora_alpha": NaN, "target_modules": ["q_proj"]}')
config_text("config-json", "nested", "[" * 100_000)
config_text("config-json", "not UTF-8", b'{"r": "\xff"}')
config_text("config-json", "a byte order mark", json.dumps(good_config()).encode("utf-8-sig"))
config_text("config-json", "r twice", '{"r": 4, "r": 8, "lora_alpha": 8, "target_modules": ["x"]}')
config_text("config-json", "a number of 5,000 digits", '{"r": ' + "9" * 5000 + "}")
config_text("config-too-large", "2 MiB", " " * (2 << 20))
for field in ("r", "lora_alpha", "target_modules"):
    config_case("config-field", f"no {field}", **{field: ...})
for rank in (0, -1, True, "8", 8.0, None, 10**30):
    config_case("config-field", f"r is {rank!r}", r=rank)
for alpha in ("16", None, True, 10**400, [1]):
    config_case("config-field", f"alpha is {str(alpha)[:9]}", lora_alpha=alpha)
for target in ([], "", None, 3, [1], ["\ud800"], {"q_proj": 1}):
    config_case("config-field", f"target_modules is {target!a}", target_modules=target)
config_case("config-field", "rslora is text", use_rslora="yes")
config_case("config-field", "rank_pattern is a list", rank_pattern=[1])
config_case("config-field", "rank_pattern holds 0", rank_pattern={"q_proj": 0})
config_case("config-field", "alpha_pattern holds text", alpha_pattern={"q_proj": "8"})
config_case("config-field", "base model is a list", base_model_name_or_path=["a/b"])
config_case("pattern", "not a regular expression", rank_pattern={"(": 4})
config_case("pattern", "exponential", rank_pattern={"(a+)+": 4})
config_case("pattern", "more keys than any adapter has", rank_pattern={str(at): 4 for at in range(2_001)})
config_case("many-patterns", "ranks", rank_pattern={str(at): 4 for at in range(401)})
config_case("pattern", "exponential, hidden by an escape", rank_pattern={r"(a+|\\)+": 4})
config_case("peft-type", "LoHa", peft_type="LOHA")
config_case("peft-type-missing", "no peft_type", peft_type=...)
config_case("dora", "DoRA", use_dora=True)
config_case("lora-bias", "bias on lora_B", lora_bias=True)
config_case("bias", "all", bias="all")
config_case("bias", "null, which vLLM refuses too", bias=None)
config_case("init", "PiSSA", init_lora_weights="pissa_niter_16")
config_case("alora", "aLoRA", alora_invocation_tokens=[1, 2])
config_case("layer-replication", "layers twice", layer_replication=[[0, 2], [1, 2]])
config_case("bdlora", "BD-LoRA", use_bdlora={"nblocks": 2})
config_case("qalora", "QALoRA", use_qalora=True)
config_case("lora-variant", "KaSA", kasa_config={"beta": 1})
config_case("config-field", "a head 65 times", modules_to_save=65 * ["score"])
config_case("modules-to-save", "lm_head", modules_to_save=["lm_head"])
config_case("modules-to-save", "a word", modules_to_save="score")
config_case("classification-head", "score", modules_to_save=["score"])
config_case("added-tokens", "token indices", trainable_token_indices=[1])
config_case("rank-too-high", "r", r=32)
config_case("rank-too-high", "rank_pattern", rank_pattern={"up_proj": 32})
config_case("zero-weights", "alpha is 0", lora_alpha=0)

# the safetensors header
weights_case("header", "does not begin with {", lambda _: raw_safetensors(b" {}", b""))
header_case("header", "a list", [])
header_case("header", "not UTF-8", b'{"\xff"}')
header_case("header", "nested", b'{"a":' + b"[" * 100_000)
header_case("header", "entry is a number", {"a": 1})
header_case("header", "entry has no shape", {"a": {"dtype": "F32", "data_offsets": [0, 0]}})
header_case("header", "unknown dtype", {"a": entry(dtype="F31")})
header_case("header", "negative axis", {"a": entry(shape=[-1])})
header_case("header", "axis is a truth value", {"a": entry(shape=[True])})
header_case("header", "200 axes", {"a": entry(shape=[1] * 200)})
header_case("header", "three offsets", {"a": entry(data_offsets=[0, 4, 8])})
header_case("header", "metadata of numbers", {"__metadata__": {"a": 1}})
header_case("header", "metadata in a list", {"__metadata__": []})
header_case("header", "control character in a name", {"a\x1b[2J": entry()})
header_case("header", "name twice", b'{"a":{},"a":{}}')
weights_case("header-too-large", "claims 2**60", lambda data: struct.pack("<Q", 2**60) + data)
header_case("header-too-large", "two million commas", b'{"a":[' + b"0," * 2_000_000 + b"0]}")
header_case("offsets", "gap", {"a": entry(data_offsets=[4, 20])}, bytes(20))
header_case("offsets", "overlap", {"a": entry(), "b": entry(data_offsets=[8, 24])}, bytes(24))
header_case("offsets", "end before begin", {"a": entry(data_offsets=[0, 0])})
header_case("offsets", "shape disagrees", {"a": entry(shape=[3, 2])}, bytes(16))
header_case("offsets", "shape beyond any file", {"a": entry(shape=[2**62] * 8)}, bytes(16))
header_case("no-tensors", "empty header", {})
header_case("no-tensors", "only metadata", {"__metadata__": {"format": "pt"}})
weights_case("truncated", "one byte short", lambda data: data[:-1])
weights_case("truncated", "empty", lambda _: b"")
weights_case("truncated", "in the header", lambda data: data[:40])
weights_case("trailing-bytes", "one byte more", lambda data: data + b"\0")

# tensors
tensor_case(
    "unknown-tensor",
    "the adapter's name inside",
    lambda draft: rename(draft, "lora_A.weight", "lora_A.default.weight"),
)
tensor_case(
    "unknown-tensor",
    "of no module",
    lambda draft: draft.tensors.update(
        {f"{half}.weight": np.ones((RANK, RANK), np.float32) for half in ("lora_A", "lora_B")}
    ),
)
tensor_case("unknown-tensor", "LoHa", lambda draft: rename(draft, "lora_A.weight", "hada_w1_a"))
tensor_case(
    "duplicate-tensor",
    "with and without the prefix",
    lambda draft: draft.tensors.update({f"{Q0}.lora_A.weight": draft.tensors[tensor_name(Q0, "lora_A")]}),
)
for half in ("lora_A", "lora_B"):
    tensor_case(
        "unpaired-tensor",
        f"no {half}",
        partial(drop, part=half),
    )
tensor_case(
    "unpaired-tensor",
    "halves of a layer and of a look-up table",
    lambda draft: rename(draft, "lora_B.weight", "lora_embedding_B"),
)
for half, empty in (("lora_A", (RANK, 0)), ("lora_B", (0, RANK))):
    tensor_case("tensor-shape", f"{half} of one axis", partial(replace, part=half, values=np.ones(8)))
    tensor_case("tensor-shape", f"{half} is empty", partial(replace, part=half, values=np.ones(empty)))
tensor_case(
    "tensor-shape",
    "B transposed",
    lambda draft: replace(draft, "lora_B", np.ones((RANK, HIDDEN), np.float32)),
)
tensor_case(
    "partial-experts",
    "of two only one has them",
    lambda draft: rename(draft, "self_attn.q_proj", "mlp.experts.1.down_proj"),
)
config_case("rank-mismatch", "config lies about r", r=8)
config_case("rank-mismatch", "rank_pattern lies", rank_pattern={"layers.1.self_attn.v_proj": 2})


@case("pattern", "a name beyond any real one")
def _(draft: Draft) -> None:
    draft.config["rank_pattern"] = {"q_proj": RANK}
    rename(draft, "self_attn", "a" * 130)
    draft.write()


tensor_case("dtype", "int8", partial(replace, part="lora_A", values=np.ones((RANK, HIDDEN), np.int8)))
config_case("target-modules", "leaves v_proj out", target_modules=["q_proj"])
config_case("target-modules", "expression", target_modules=r".*\.q_proj")
config_case("target-modules", "excluded", exclude_modules=["v_proj"])
config_case("target-modules", "excluded by an expression", exclude_modules=r".*\.v_proj")
config_case("target-without-tensors", "k_proj", target_modules=["q_proj", "v_proj", "k_proj"])
config_case("target-without-tensors", "too complex", target_modules=".*?a" * 9)
tensor_case(
    "base-embedding",
    "lm_head",
    lambda draft: draft.tensors.update(
        {"base_model.model.lm_head.base_layer.weight": np.ones((64, HIDDEN), np.float32)}
    ),
)
tensor_case(
    "added-tokens",
    "embedding with more tokens",
    lambda draft: draft.tensors.update(
        {"base_model.model.lm_head.base_layer.weight": np.ones((70, HIDDEN), np.float32)}
    ),
)
for value in (np.nan, np.inf, -np.inf):
    tensor_case("non-finite", str(value), partial(spoil, value=value))
tensor_case("overflow", "1e25", partial(spoil, value=1e25))
config_case("overflow", "alpha is 1e308", lora_alpha=1e308)
config_case("overflow", "alpha is 1e6", lora_alpha=1e6)
tensor_case(
    "zero-weights",
    "one lora_A",
    lambda draft: replace(draft, "lora_A", np.zeros((RANK, HIDDEN), np.float32)),
)

# the base model
config_case("base-model", "another model", base_model_name_or_path="acme/tiny-llama-v2")
config_case("base-model-missing", "no base model", base_model_name_or_path=...)
tensor_case("no-such-module", "name", lambda draft: rename(draft, "self_attn", "attention"))
tensor_case("no-such-module", "prefix", lambda draft: rename(draft, "model.model.", "model.decoder."))
tensor_case("bare-model", "prefix", lambda draft: rename(draft, "model.model.", "model."))
tensor_case("no-such-module", "layer", lambda draft: rename(draft, "layers.1", "layers.2"))
tensor_case(
    "wrong-shape",
    "in",
    lambda draft: replace(draft, "lora_A", np.ones((RANK, HIDDEN - 8), np.float32)),
)
tensor_case(
    "wrong-shape",
    "out",
    lambda draft: replace(draft, "lora_B", np.ones((HIDDEN + 8, RANK), np.float32)),
)

# made by files of a kind, another base model, an engine's version or a fleet, in modules of their own
FILES = {"symlink", "not-regular-file", "permission"}
ELSEWHERE = {*FILES, "layer-out-of-range", "renamed-experts", "engine-too-old", "no-replica", "some-replicas"}
ELSEWHERE |= {"unsigned", "untrusted", "signature-mismatch"}  # tests/trust


@pytest.mark.parametrize(
    ("code", "breaks"),
    [pytest.param(code, breaks, id=f"{code}: {name}") for code, name, breaks in CASES],
)
def test_broken_in_one_place(code: str, breaks: Callable[[Draft], None], draft: Draft) -> None:
    """The case gets its code; it is refused exactly when the table says error."""
    breaks(draft)
    report = validate(draft.folder, KNOWN)
    made = {finding.code: finding for finding in report.findings}
    assert code in made
    finding = made[code]
    assert finding.file
    assert finding.message
    if CODES[code].severity is Severity.ERROR:
        assert not report.ok
        errors = {one.code for one in report.errors}
        can_be = all(CODES[one].overridable and CODES[one].served for one in errors)
        assert (f"allow with --allow {code}" in finding.hint) == can_be


@pytest.mark.parametrize("code", [code for code, entry in CODES.items() if entry.overridable])
def test_overridable_errors_become_warnings(code: str, draft: Draft) -> None:
    """``--allow CODE`` leaves a finding of that code as a warning."""
    next(breaks for made, _, breaks in CASES if made == code)(draft)
    allowed = Expectation(
        model_ids=KNOWN.model_ids,
        base_config=BASE_CONFIG,
        max_rank=16,
        allow=frozenset({code}),
    )
    report = validate(draft.folder, allowed)
    assert code in {finding.code for finding in report.warnings}
    assert code not in {finding.code for finding in report.errors}


def test_every_code_has_a_case() -> None:
    """A code no test makes is a promise nobody checks."""
    assert {code for code, _, _ in CASES} | ELSEWHERE == set(CODES)


def test_good_adapter(adapter: Path) -> None:
    """Nothing is said of a good adapter, and its shape is read."""
    report = validate(adapter, KNOWN)
    assert report.findings == ()
    assert report.ok
    assert report.base_model == "acme/tiny-llama"
    assert report.served_files == (CONFIG_FILE, WEIGHTS_FILE)
    assert report.shape is not None
    assert report.shape.model_dump() == {
        "rank": RANK,
        "alpha": 8.0,
        "target_modules": ("q_proj", "v_proj"),
        "dtype": "float32",
        "use_rslora": False,
    }


@pytest.mark.parametrize("listed", [True, False])
def test_a_classification_head(listed: bool, draft: Draft) -> None:
    """It is a whole module that modules_to_save lists, and no half of a pair."""
    draft.tensors["base_model.model.score.weight"] = np.ones((3, HIDDEN), np.float32)
    draft.config["modules_to_save"] = ["score"] if listed else None
    codes = [finding.code for finding in validate(draft.write(), KNOWN).findings]
    assert codes == ["classification-head" if listed else "unknown-tensor"]


def test_rank_pattern_is_followed(draft: Draft) -> None:
    """A module whose rank rank_pattern gives is held against that rank; rsLoRA is accepted."""
    name = "model.layers.1.self_attn.v_proj"
    draft.tensors[tensor_name(name, "lora_A")] = np.ones((8, HIDDEN), np.float32)
    draft.tensors[tensor_name(name, "lora_B")] = np.ones((KV, 8), np.float32)
    draft.config |= {"rank_pattern": {r"layers\.1\.self_attn\.v_proj": 8}, "use_rslora": True}
    report = validate(draft.write(), KNOWN)
    assert report.findings == ()
    assert report.shape is not None
    assert (report.shape.rank, report.shape.use_rslora) == (8, True)


def test_pickle_that_is_allowed_is_not_read(draft: Draft) -> None:
    """With --allow pickle a pickle passes unread, and the report says its dtype is unknown."""
    folder = draft.write()
    (folder / WEIGHTS_FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")
    report = validate(folder, Expectation(allow=frozenset({"pickle"})))
    assert report.ok
    assert report.served_files == (CONFIG_FILE, "adapter_model.bin")
    assert report.shape is not None
    assert report.shape.dtype == "unknown"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"r": "4"}, 'is the text "4", not a positive integer'),
        ({"r": 4.0}, "is 4.0, not a positive integer"),
        ({"lora_alpha": "8"}, 'is the text "8", not a finite number'),
        ({"rank_pattern": {"q_proj": "4"}}, 'is the text "4", not a positive integer'),
        ({"alpha_pattern": {"q_proj": "8"}}, 'is the text "8", not a finite number'),
    ],
)
def test_text_is_told_from_a_number(draft: Draft, fields: dict[str, object], said: str) -> None:
    """A message that shows a number where one is needed shows why it is none."""
    draft.config |= fields
    (finding,) = validate(draft.write()).errors
    assert finding.message == said


@pytest.mark.parametrize("code", ["truncated", "dorra"])
def test_what_cannot_be_allowed(code: str) -> None:
    """A structural error and a typo are refused as --allow, not silently taken."""
    with pytest.raises(InputError, match=code):
        Expectation(allow=frozenset({code}))


def test_without_lora_tensors_no_target_is_told(draft: Draft) -> None:
    """That the file holds none says it of each target."""
    draft.tensors = {}
    findings = validate(draft.write(), KNOWN).findings
    assert [finding.code for finding in findings] == ["no-tensors"]


def test_a_target_whose_tensors_are_refused_has_tensors(draft: Draft) -> None:
    """A module that lacks a half gets that one finding."""
    draft.tensors = {name: values for name, values in draft.tensors.items() if "lora_A" in name}
    assert {finding.code for finding in validate(draft.write(), KNOWN).findings} == {"unpaired-tensor"}


@pytest.mark.parametrize("modules", [None, []])
def test_target_parameters_stand_in_for_target_modules(draft: Draft, modules: object) -> None:
    """Their names are not the tensors': nothing is compared."""
    draft.config |= {"target_modules": modules, "target_parameters": ["experts.weight"]}
    assert validate(draft.write(), KNOWN).findings == ()
    del draft.config["target_parameters"]
    assert [finding.code for finding in validate(draft.write(), KNOWN).errors] == ["config-field"]


def test_names_of_refused_tensors_take_of_the_budget(draft: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many long ones take as long to compare with the targets as those of modules do."""
    monkeypatch.setattr(weights_tensors, "Budget", partial(Budget, -1.0))
    draft.tensors = {name: values for name, values in draft.tensors.items() if "lora_A" in name}
    assert {finding.code for finding in validate(draft.write()).errors} == {"unpaired-tensor", "pattern"}


def test_findings_are_bounded(draft: Draft) -> None:
    """A fault repeated in every layer is told a few times and then counted."""
    draft.tensors = {f"x{number}.lora_A.default.weight": np.ones((1, 1), np.float32) for number in range(500)}
    report = validate(draft.write())
    told = [f for f in report.findings if f.code == "unknown-tensor"]
    assert len(told) < 20
    assert told[-1].message == "and 492 more like these"


def test_progress_counts_the_weights(adapter: Path) -> None:
    """The calls of ``progress`` add up to the bytes of all tensors."""
    counted: list[int] = []
    validate(adapter, progress=counted.append)
    data = (adapter / WEIGHTS_FILE).read_bytes()
    assert sum(counted) == len(data) - 8 - struct.unpack("<Q", data[:8])[0]


def test_contents_can_be_left_out(draft: Draft) -> None:
    """Without ``contents`` the weights' bytes are not read: NaN passes."""
    spoil(draft, float("nan"))
    assert validate(draft.write(), contents=False).ok


def test_safetensors_agrees(adapter: Path) -> None:
    """What the tests write is what the safetensors library reads."""
    from safetensors.numpy import load

    from tests.validate.conftest import good_tensors

    read = load((adapter / WEIGHTS_FILE).read_bytes())
    assert read.keys() == good_tensors().keys()
    assert safetensors_bytes(good_tensors()) == (adapter / WEIGHTS_FILE).read_bytes()
    assert json.loads((adapter / CONFIG_FILE).read_text())["r"] == RANK
