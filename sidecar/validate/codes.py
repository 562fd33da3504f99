"""Every finding validation can make: the one table of codes, their severity and who may overrule.

Codes are stable: scripts match them and ``--allow CODE`` names them. No code ever gets
another meaning. This module holds data and nothing else; ``docs/`` lists it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lora_fs.sidecar.model import Severity


@dataclass(frozen=True, slots=True)
class Code:
    """The meaning of a finding code.

    Attributes:
        doc: one line for the docs, true of every finding with this code.
        severity: the severity where nothing overrules it.
        overridable: whether ``--allow CODE`` turns the error into a warning.
        served: whether an engine then serves the adapter; else there is no hint to allow it.
    """

    doc: str
    severity: Severity = Severity.ERROR
    overridable: bool = False
    served: bool = True


def _refused(doc: str) -> Code:
    return Code(doc)


def _overridable(doc: str) -> Code:
    return Code(doc, overridable=True)


def _engines(doc: str) -> Code:
    """What vLLM 0.32 itself refuses; another engine may not."""
    return Code(doc, overridable=True, served=False)


def _told(doc: str) -> Code:
    return Code(doc, severity=Severity.WARNING)


CODES: Mapping[str, Code] = MappingProxyType(
    {
        # the folder and its files
        "missing-folder": _refused("the adapter's folder is not there, or is not a folder"),
        "missing-config": _refused("adapter_config.json is not there"),
        "missing-weights": _refused("no weights file that vLLM reads is there"),
        "sharded-weights": _refused("the weights are split over files; vLLM reads one file only"),
        "pickle": _overridable("the weights are a pickle: loading it runs code, nothing is checked"),
        "unserved-weights": _told("a further weights file lies there and is never read"),
        "symlink": _refused("a symlink stands where a file is expected"),
        "not-regular-file": _refused("a FIFO, socket, device or folder stands in place of a file"),
        "permission": _refused("this process may not read the file"),
        "lfs-pointer": _refused("a Git LFS pointer stands in place of the file's content"),
        "unfinished-copy": _refused("the file has its full size, its bytes have not all arrived"),
        # adapter_config.json
        "config-json": _refused("adapter_config.json is not one unambiguous JSON object"),
        "config-too-large": _refused("adapter_config.json is larger than any real one"),
        "config-field": _refused("a field is missing or is not of the type vLLM needs"),
        "pattern": _refused("a regular expression is invalid or too costly to run on every name"),
        "many-patterns": Code(
            "so many keys in rank_pattern and alpha_pattern that a load stalls a stock engine",
            severity=Severity.WARNING,
            overridable=True,
        ),
        "peft-type": _overridable("the adapter is not a LoRA; vLLM ignores the field and misreads"),
        "peft-type-missing": _told("peft_type is not given; LoRA is assumed, as vLLM does"),
        "dora": _engines("weight-decomposed LoRA, which vLLM refuses"),
        "lora-bias": _engines("biases on LoRA layers, which vLLM refuses"),
        "bias": _engines("trained biases of the base model, which vLLM refuses"),
        "init": _overridable("an initialisation that changes the base weights (PiSSA, OLoRA, …)"),
        "alora": _engines("activated LoRA, which vLLM refuses"),
        "layer-replication": _engines("replicated base layers, which vLLM refuses"),
        "bdlora": _engines("block-diagonal LoRA, which vLLM refuses"),
        "qalora": _engines("QALoRA, which vLLM refuses"),
        "lora-variant": _overridable("a LoRA variant that vLLM ignores and computes as plain LoRA"),
        "modules-to-save": _engines("whole trained modules that vLLM does not load"),
        "classification-head": _told("a classification head that only a pooling engine serves"),
        "added-tokens": _overridable("trained or added token embeddings, which vLLM ignores"),
        "engine-too-old": _refused(
            "this replica's vLLM is too old to serve it right, or of an unknown version"
        ),
        "rank-too-high": _engines("a rank above the engine's --max-lora-rank"),
        # the safetensors header
        "header": _refused("the safetensors header is damaged or is not one"),
        "header-too-large": _refused("the safetensors header is beyond the format's bounds"),
        "truncated": _refused("the file is shorter than its header says"),
        "trailing-bytes": _refused("the file is longer than its header says"),
        "offsets": _refused("tensors overlap, leave a gap, or disagree with dtype × shape"),
        "duplicate-tensor": _refused("one tensor or module is given twice"),
        "no-tensors": _refused("the file holds no LoRA tensor: requests would get the base model"),
        # tensors
        "unknown-tensor": _refused("a tensor's name is none vLLM can parse"),
        "unpaired-tensor": _refused("a lora_A without its lora_B, or the reverse"),
        "tensor-shape": _refused("lora_A is not [r, in] or lora_B is not [out, r]"),
        "rank-mismatch": _refused("the tensors' rank is not the config's: the scale would be wrong"),
        "partial-experts": _engines("a layer of experts of which some lack a LoRA, or a projection of it"),
        "dtype": _overridable("a dtype other than float64, float32, float16 or bfloat16"),
        "target-modules": _overridable(
            "tensors of modules that target_modules or exclude_modules leaves out"
        ),
        "target-without-tensors": _told("target_modules names a module without tensors"),
        "base-embedding": _told("the base model's embedding is in the file; vLLM ignores it"),
        "non-finite": _refused("NaN or Inf among the weights"),
        "overflow": _overridable("weights that float16 cannot hold, by themselves or times alpha / r"),
        "zero-weights": _told("weights that are all zero: the adapter does nothing there"),
        # the base model
        "base-model": _overridable("the adapter was trained on another base model"),
        "base-model-missing": _told("the config does not say which base model it is for"),
        "bare-model": _told("names without `model.`, of an AutoModel, which only a pooling engine serves"),
        "no-such-module": _overridable("the base model has no such module: vLLM ignores it"),
        "renamed-experts": _told(
            "transformers 5's name of a Mixtral's experts, which the plugin alone knows"
        ),
        "wrong-shape": _engines("a tensor does not fit the base model's layer"),
        "layer-out-of-range": _told("a layer index beyond the base model's layers"),
        # the signature
        "unsigned": _refused("model.sig is not there, and the namespace takes signed adapters only"),
        "untrusted": _refused("model.sig is damaged, expired, or by nobody who may sign in the namespace"),
        "signature-mismatch": _refused("a trusted signer signed other bytes than these"),
        # the fleet
        "no-replica": _refused("no live replica can serve it, for the reasons that are listed"),
        "some-replicas": _told("some live replicas cannot serve it, for the reasons that are listed"),
    }
)
