"""The ConfigMap of gateway-api-inference-extension's dynamic-lora-sidecar, which is no more.

It reads the manifest (``kind: ConfigMap``, the configuration a text in its ``data``) and the bare
configuration (``vLLMLoRAConfig``). As that sidecar did, it ignores a model in both lists. What
said where vLLM is (``host``, ``port``) has no meaning here. A file that cannot be read is an error
and never an empty list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.uri import is_uri, scheme_of

CONFIG = "vLLMLoRAConfig"


@dataclass(frozen=True, slots=True)
class Listed:
    """One model of a list. ``base_model``: its own, else ``defaultBaseModel``, else None."""

    name: str
    source: str | None
    base_model: str | None


@dataclass(frozen=True, slots=True)
class Config:
    """What the ConfigMap wants to exist, and not to exist; ``both`` are in both lists."""

    exist: tuple[Listed, ...]
    not_exist: tuple[Listed, ...]
    both: tuple[str, ...]


def uri_of(source: str) -> str | None:
    """What to fetch for a ``source``, which that sidecar gave vLLM: ``org/repo``, or a URI.

    None: it is a path, or names what lies here.
    """
    if is_uri(source):
        return source if scheme_of(source) not in ("file", "pvc") else None
    named = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", source)
    return f"hf://{source}" if named and not Path(source).exists() else None


def parse(text: str) -> Config:
    """Read a ConfigMap or the configuration in it.

    Raises:
        InputError: it is neither, and where it is wrong.
    """
    body = _config(_yaml(text))
    default = body.get("defaultBaseModel")
    exist = _models(body, "ensureExist", default)
    absent = _models(body, "ensureNotExist", default)
    both = {one.name for one in exist} & {one.name for one in absent}
    return Config(
        tuple(one for one in exist if one.name not in both),
        tuple(one for one in absent if one.name not in both),
        tuple(sorted(both)),
    )


def _yaml(text: str) -> Any:
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"not YAML: {error}") from error
    found = [
        one
        for one in documents
        if isinstance(one, dict) and (CONFIG in one or one.get("kind") == "ConfigMap")
    ]
    if len(found) != 1:
        raise InputError(
            f"{len(found)} of its documents are a ConfigMap or have {CONFIG}: give a file with one"
        )
    return found[0]


def _config(value: dict[str, Any]) -> dict[str, Any]:
    if CONFIG not in value:
        data = value.get("data")
        texts = data.values() if isinstance(data, dict) else ()
        inner = [text for text in texts if isinstance(text, str) and CONFIG in text]
        if len(inner) != 1:
            raise InputError(f"{len(inner)} of the ConfigMap's data hold {CONFIG}: there has to be one")
        value = _yaml(inner[0])
    body = value[CONFIG]
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise InputError(f"{CONFIG}: not a mapping")
    return body


def _models(body: dict[str, Any], which: str, default: Any) -> list[Listed]:
    part = body.get(which)
    models = (part.get("models") if isinstance(part, dict) else part) or []
    if not isinstance(models, list):
        raise InputError(f"{CONFIG}.{which}.models: not a list")
    found: dict[str, Listed] = {}
    for number, model in enumerate(models):
        where = f"{CONFIG}.{which}.models[{number}]"
        if not isinstance(model, dict) or not isinstance(model.get("id"), str):
            raise InputError(f"{where}: not a mapping with an `id` that is text")
        one = Listed(model["id"], model.get("source"), model.get("base-model") or default or None)
        for name, value in (("source", one.source), ("base-model", one.base_model)):
            if value is not None and not isinstance(value, str):
                raise InputError(f"{where}.{name}: not text")
        if one.source is None and which == "ensureExist":
            raise InputError(f"{where}.source: is missing")
        if found.setdefault(one.name, one) != one:
            raise InputError(f"{where}: {one.name!r} is listed twice and not the same")
    return list(found.values())
