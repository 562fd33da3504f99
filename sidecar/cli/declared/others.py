"""Other systems' documents as ours. Ignores what they say of other things. Pure.

GIE's ConfigMap, KServe's LLMInferenceService, Dynamo's DynamoModel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from lora_fs.sidecar import yaml_texts as texts
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import PolicyKind
from lora_fs.sidecar.sources.migration import gie
from lora_fs.sidecar.yaml_texts import Path, Tree, Wrong, shown_path

POLICIES: Final = frozenset(kind.value for kind in PolicyKind)


@dataclass(frozen=True, slots=True)
class Translated:
    """A document of ours as plain values. ``at``: made from this. ``absent``: nobody wants it."""

    value: dict[str, Any]
    at: Path = ()
    absent: bool = False


def _ours(
    metadata: dict[str, Any], spec: dict[str, Any], at: Path = (), *, absent: bool = False
) -> Translated:
    def given(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    value = {"metadata": given(metadata), "spec": given(spec)}
    return Translated({"apiVersion": "lora-fs/v1", "kind": "LoraAdapter", **value}, at, absent)


def from_gie(tree: Tree) -> Iterator[Translated]:
    """``ensureExist`` is wanted, ``ensureNotExist`` is not. Ignores an adapter in both, as GIE does."""
    data = tree.value.get("data")
    for key, text in data.items() if isinstance(data, dict) else ():
        if isinstance(text, str) and gie.CONFIG in text:  # what gie.parse reads: its keys and its depth
            texts.parse(text, tree.line_of(("data", key)) + 1)
    try:
        config = gie.parse(tree.text)
    except InputError as error:
        raise Wrong(tree.line_of(("data",)), "data", str(error)) from error
    space = _namespace(tree)
    for one in config.exist:
        source = one.source or ""
        spec = {"source": gie.uri_of(source) or source, "model": one.base_model}
        yield _ours({"name": one.name, "namespace": space}, spec, ("data",))
    for one in config.not_exist:
        spec = {"source": one.source or "none", "model": one.base_model}
        yield _ours({"name": one.name, "namespace": space}, spec, ("data",), absent=True)


def from_kserve(tree: Tree) -> Iterator[Translated]:
    """``spec.model.lora.adapters``, each with its ``name`` and ``uri``."""
    model = _at(tree, ("spec", "model"), dict)
    base = model.get("name")
    if base is None:
        base = str(model.get("uri", "")).removeprefix("hf://") or None
    place: Path = ("spec", "model", "lora", "adapters")
    if "lora" not in model:
        return
    for number, one in enumerate(_at(tree, place, list)):
        here = (*place, number)
        _mapping(tree, one, here)
        for field in ("name", "uri"):
            if not isinstance(one.get(field), str):
                raise Wrong(tree.line_of((*here, field)), shown_path((*here, field)), "text is needed here")
        metadata = {"name": one["name"], "namespace": _namespace(tree)}
        yield _ours(metadata, {"source": one["uri"], "model": base}, here)


def from_dynamo(tree: Tree) -> Iterator[Translated]:
    """``spec.loras``. A version that ends a ``loraId`` is the revision; its other ``/`` become ``--``."""
    base = _at(tree, ("spec", "baseModel", "name"), str)
    for number, one in enumerate(_at(tree, ("spec", "loras"), list)):
        here: Path = ("spec", "loras", number)
        _mapping(tree, one, here)
        called = _at(tree, (*here, "loraId"), str)
        found = re.fullmatch(r"(.+)/(v[0-9]\S*)", called)
        name, revision = (found[1], found[2]) if found else (called, None)
        policy: dict[str, Any] = {}
        if (kind := one.get("loadingPolicy")) is not None:
            if not isinstance(kind, str) or kind not in POLICIES:
                field = (*here, "loadingPolicy")
                raise Wrong(tree.line_of(field), shown_path(field), f"none of {', '.join(sorted(POLICIES))}")
            policy["kind"] = kind
        if (priority := one.get("priority")) is not None:
            policy["priority"] = priority
        spec = {"source": _dynamo_source(tree, here), "model": base, "revision": revision, "policy": policy}
        metadata = {"name": name.replace("/", "--"), "namespace": _namespace(tree)}
        yield _ours(metadata, spec, here)


def _dynamo_source(tree: Tree, here: Path) -> str:
    place = (*here, "source")
    kind = _at(tree, (*place, "type"), str)
    if kind == "huggingface":
        named = _at(tree, place, dict).get("revision") is not None
        revision = f"@{_at(tree, (*place, 'revision'), str)}" if named else ""
        return f"hf://{_at(tree, (*place, 'repository'), str)}{revision}"
    if kind in ("s3", "gcs"):
        scheme = "gs" if kind == "gcs" else kind
        inside = _at(tree, (*place, "path"), str).strip("/")
        return f"{scheme}://{_at(tree, (*place, 'bucket'), str)}/{inside}"
    if kind in ("pvc", "local"):
        return str(_at(tree, (*place, "path"), str))
    field = (*place, "type")
    raise Wrong(tree.line_of(field), shown_path(field), "none of huggingface, s3, gcs, pvc, local")


def _namespace(tree: Tree) -> Any:
    metadata = tree.value.get("metadata")
    return metadata.get("namespace") if isinstance(metadata, dict) else None


def _mapping(tree: Tree, value: Any, path: Path) -> None:
    if not isinstance(value, dict):
        raise Wrong(tree.line_of(path), shown_path(path), "a mapping is needed here")


def _at(tree: Tree, path: Path, kind: type[Any]) -> Any:
    """The part at a path, which has to be of a kind."""
    value = tree.value
    for depth, part in enumerate(path):
        if isinstance(part, int):
            value = value[part]
            continue
        _mapping(tree, value, path[:depth])
        value = value.get(part)
        if value is None:
            raise Wrong(tree.line_of(path), shown_path(path[: depth + 1]), "is missing")
    if not isinstance(value, kind):
        what = {"dict": "a mapping", "list": "a list", "str": "text"}[kind.__name__]
        raise Wrong(tree.line_of(path), shown_path(path), f"{what} is needed here")
    return value


KINDS: Final[dict[str, Callable[[Tree], Iterator[Translated]]]] = {
    "ConfigMap": from_gie,
    "LLMInferenceService": from_kserve,
    "DynamoModel": from_dynamo,
}
