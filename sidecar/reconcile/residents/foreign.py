"""What the engine lists and this replica did not load: its base models, and adapters from elsewhere.

An adapter from elsewhere may be a tenant's all the same: an engine outlives a sidecar, whose next one may
have another stage folder, and two sidecars may share an engine. Callers who may read its namespace may see
it, as this replica's own. The replica does not unload it: it may be the other sidecar's. It serves one that
the engine calls by its bytes (``copy_of``). Pure: no I/O.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from lora_fs.sidecar.engine.protocol import Loaded
from lora_fs.sidecar.errors import InvalidName
from lora_fs.sidecar.model import AdapterKey, JsonObject, Scope, model_slug, public_of, tells_bytes
from lora_fs.sidecar.reconcile.stage.looks import digest_at
from lora_fs.sidecar.registry.view.snapshot import Desired

UNKNOWN: Final = ""  # no namespace has this name: who may read every one may read it
_DIGEST = re.compile(r"[0-9a-f]{64}")  # what a stage folder calls a copy


@dataclass(frozen=True, slots=True)
class Foreign:
    """The engine's last list. ``cards``: the base models' first. ``roots``: of the adapters, by their names.

    ``base_cards``: of its base models alone; an engine has one for each ``--served-model-name``.
    """

    cards: tuple[JsonObject, ...] = ()
    roots: Mapping[str, str] = field(default_factory=dict)
    base_cards: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, loaded: Loaded, ours: Callable[[str], bool]) -> Foreign:
        """``ours``: whether a path is one of this replica's copies."""
        elsewhere = {name: loaded.adapters[name] for name in loaded.cards if not ours(loaded.adapters[name])}
        roots = {name: path for name, path in elsewhere.items() if copy_of(name, path) is None}
        cards = (*loaded.base_cards, *map(loaded.cards.__getitem__, roots))
        return cls(tuple(map(dict, cards)), roots, loaded.base_cards)

    @property
    def names(self) -> frozenset[str]:
        """The names of all cards."""
        return frozenset(str(card["id"]) for card in self.cards)

    def model_problem(self, model: str) -> Iterator[str]:
        """Yield the condition of a ``model`` without adapters whose name no base model of the engine has."""
        told = [str(card[field]) for card in self.base_cards for field in ("id", "root") if card.get(field)]
        if told and model not in map(_slug, told):
            yield (
                f"ModelUnknown: nothing is registered for {model}, and the engine's model is "
                f"{', '.join(dict.fromkeys(told))}: is LORA_FS_MODEL right?"
            )

    def kept_to(
        self, name: str, desired: Desired | None, model: str, namespaces: tuple[str, ...]
    ) -> str | None:
        """The namespace whose readers alone may see a name; None: everybody may.

        Args:
            desired: None as long as the volume was not read: a name may then be anybody's.
        """
        root = self.roots.get(name)
        if root is None:
            return None
        plain, at, revision = name.rpartition("@")
        plain = plain if at else name
        namespace, slash, _ = plain.partition("/")
        if slash and namespace in namespaces:
            return namespace
        if len(namespaces) == 1 and not slash:
            scope = Scope(namespaces[0], model)
            if desired is None or (scope, plain) in desired.pointers:
                return scope.namespace
            if at and AdapterKey(*scope, revision, plain) in desired.records:
                return scope.namespace
        return UNKNOWN if _is_copy(plain, root) else None


def _slug(name: str) -> str | None:
    with suppress(InvalidName):
        return model_slug(name)
    return None


def _is_copy(plain: str, root: str) -> bool:
    *_, folder, last = ("", *root.split("/"))
    return last == plain.rpartition("/")[2] and _DIGEST.fullmatch(folder) is not None


def copy_of(name: str, root: str) -> str | None:
    """The digest of a sidecar's copy, if the engine calls it as sidecars do, and no client does."""
    plain, digest = public_of(name).partition("@")[0], digest_at(root)
    return f"sha256:{digest}" if _is_copy(plain, root) and tells_bytes(name, digest) else None
