"""Find the base model's ``config.json`` on this machine: a file, a folder, or the hub's cache.

Never asks the network. What is not here is None: the checks that need it are left out, and a condition
says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

from lora_fs.sidecar.concurrency import Threads
from lora_fs.sidecar.errors import InputError, VolumeUnavailable
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.trust import Trust
from lora_fs.sidecar.validate.config.adapter_config import MAX_CONFIG_BYTES, parse_config
from lora_fs.sidecar.validate.files import Refused, open_file, open_folder
from lora_fs.sidecar.validate.report import Expectation, Findings

_FILE = "config.json"
LOOK_S = 5.0  # for a folder that may hang: the next pass asks again


def load_base_config(model: str) -> Mapping[str, object] | None:
    """Read the config of a model named by its folder, by the config file itself or by its hub id.

    Returns:
        The parsed config, or None when this machine has none, or none that is JSON.
    Raises:
        VolumeUnavailable: the volume did not answer, so whether there is one is unknown.
    """
    path = Path(os.path.expanduser(model))
    found = _read(path if path.suffix == ".json" else path / _FILE)
    if found is None and not path.is_absolute():
        cached = _in_hub_cache(model)
        found = None if cached is None else _read(cached)
    return found


def expect(settings: Settings, base_model: str | None = None, allow: tuple[str, ...] = ()) -> Expectation:
    """Gather the facts about the base model that this machine has.

    Raises:
        InputError: ``base_config`` is set and cannot be read.
    """
    ids = [i for i in (base_model, settings.base_model, settings.model) if i]
    config = None
    if settings.base_config is not None:
        config = load_base_config(str(settings.base_config))
        if config is None:
            raise InputError(
                f"--base-config {settings.base_config}: there is no config.json that can be read: "
                "name the file or its folder, or leave --base-config and LORA_FS_BASE_CONFIG out"
            )
    for candidate in ids:
        config = config or load_base_config(candidate)
    allowed = frozenset(allow + settings.allow)
    trust = Trust(settings.trust) if settings.trust is not None else None
    return Expectation(
        tuple(ids), config, settings.max_rank, allowed, settings.strict_base_model, trust=trust
    )


class BaseOfEngine:
    """Learns the base model's config from what an engine calls its model: a folder or a hub id."""

    def __init__(self, expectation: Expectation) -> None:
        self._expectation, self._learned = expectation, expectation.learned
        self._problem: str | None = None
        self._threads = Threads(1)

    async def learn(self, cards: Iterable[Mapping[str, object]]) -> None:
        """Look for the config of an engine's model cards, unless it was found or they are as before."""
        roots = tuple(dict.fromkeys(str(card["root"]) for card in cards if card.get("root")))
        if roots == self._learned.names and self._problem is None:
            return
        config = None
        if self._expectation.base_config is None:
            try:
                config = await self._threads.run(partial(_first, roots), LOOK_S)
            except (TimeoutError, VolumeUnavailable) as error:
                self._problem = f"the base model's folder does not answer: {error}"
                return
        self._learned.base_config, self._learned.names, self._problem = config, roots, None

    def conditions(self) -> tuple[str, ...]:
        """The condition that nothing compares adapters with the base model's layers."""
        names = self._learned.names
        if self._expectation.base() is not None or not (names or self._problem):
            return ()
        why = self._problem or f"there is no config.json here of {shown(', '.join(names))}"
        return (
            f"BaseConfigUnknown: {why}: whether adapters fit the base model is not checked; set "
            "LORA_FS_BASE_CONFIG to its folder",
        )


def _first(models: Iterable[str]) -> Mapping[str, object] | None:
    return next((found for model in models if (found := load_base_config(model)) is not None), None)


def _in_hub_cache(model: str) -> Path | None:
    # Imported here: it takes a tenth of a second that most callers have no use for.
    from huggingface_hub import try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, _FILE)
    except ValueError:  # HFValidationError: a served name or a path, not a hub id
        return None
    return Path(path) if isinstance(path, str) else None


def _read(path: Path) -> Mapping[str, object] | None:
    # The hub's cache is made of symlinks, and unlike an adapter the base model is the operator's.
    real = Path(os.path.realpath(path))
    try:
        with open_folder(real.parent) as folder, open_file(folder, real.name) as file:
            if file is None or file.size_bytes > MAX_CONFIG_BYTES:
                return None
            return parse_config(file.read(0, file.size_bytes), Findings())
    except Refused:
        return None
