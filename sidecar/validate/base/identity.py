"""Tell whether two names mean one base model: hub id, served name, path or cache folder.

Pure text, without look-ups. ``Qwen/Qwen2.5-7B``, ``qwen/qwen2.5-7b``, ``Qwen2.5-7B``,
``/models/Qwen2.5-7B/``, ``Qwen--Qwen2.5-7B`` and
``…/models--Qwen--Qwen2.5-7B/snapshots/<sha>`` are one model. Names that differ are sure to be
other models only where both are hub ids: a served name may be anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.report import Findings

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SLUG = re.compile(r"([A-Za-z0-9](?:[\w.]|-(?!-))*)--([A-Za-z0-9][\w.-]*)", re.ASCII)
_CACHE = re.compile(r"(?:^|/)models--([^/]+?)--([^/]+?)(?:/snapshots/[^/]+)?(?:/.*)?$")
_FIELD = "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class ModelName:
    """One name, taken apart: ``hub_id`` where it is one, ``last`` its last component."""

    text: str
    hub_id: str | None
    last: str

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Take a name apart. Ignores case, as the hub does."""
        bare = text.strip().rstrip("/").casefold()
        cached = _CACHE.search(bare)
        slug = _SLUG.fullmatch(bare)
        if cached is not None:
            bare = f"{cached[1]}/{cached[2]}"
        elif slug is not None:
            bare = f"{slug[1]}/{slug[2]}"
        hub_id = bare if _HUB_ID.fullmatch(bare) else None
        last = bare.rsplit("/", 1)[-1]
        # /models/org--name, where a slug names a folder
        folder = _SLUG.fullmatch(last)
        if hub_id is None and folder is not None:
            hub_id, last = f"{folder[1]}/{folder[2]}", folder[2]
        return cls(bare, hub_id, last)

    def same_as(self, other: ModelName) -> bool:
        """Whether both mean one model, as far as names can tell."""
        if self.hub_id is not None and other.hub_id is not None:
            return self.hub_id == other.hub_id
        return self.text == other.text or (self.last == other.last and self.last != "")


def check_base_model(
    base_model: str | None,
    model_ids: Sequence[str],
    found: Findings,
    *,
    further: Sequence[str] = (),
    strict: bool = False,
) -> None:
    """Compare the config's base model with every name the served one goes by.

    Args:
        further: the engine's own names, perhaps of a variant of the adapter's base: such a name
            agrees, and never refuses.
        strict: refuse an adapter that no name agrees with, also where names cannot tell.
    """
    if base_model is None:
        found.add("base-model-missing", CONFIG_FILE, _FIELD, "is missing")
        return
    if not model_ids:
        return
    wanted = ModelName.parse(base_model)
    known = [ModelName.parse(name) for name in model_ids]
    if any(wanted.same_as(name) for name in (*known, *map(ModelName.parse, further))):
        return
    sure = strict or (wanted.hub_id is not None and any(name.hub_id is not None for name in known))
    served = ", ".join(shown(name) for name in model_ids)
    found.add(
        "base-model",
        CONFIG_FILE,
        _FIELD,
        f"is {shown(base_model)}; the base model here is {served}",
        hint="" if sure else "the names cannot tell; check that they are one model",
        severity=None if sure else Severity.WARNING,
    )
