"""A flat store of adapters as NVIDIA NIM reads it (``NIM_PEFT_SOURCE``): a folder an adapter, named as it."""

from __future__ import annotations

import os
from pathlib import Path

from lora_fs.sidecar.errors import InputError


def adapters(store: Path) -> dict[str, Path]:
    """The folders of a store by their name; hidden ones and files are none.

    Raises:
        InputError: the store does not list, or holds no folder at all.
    """
    try:
        with os.scandir(store) as entries:
            found = {
                one.name: Path(one.path) for one in entries if one.is_dir() and not one.name.startswith(".")
            }
    except OSError as error:
        raise InputError(f"cannot list {store}: {error.strerror}") from error
    if not found:
        raise InputError(
            f"{store} holds no folder: give the one whose folders are the adapters (NIM_PEFT_SOURCE)"
        )
    if "adapter_config.json" in found or (store / "adapter_config.json").exists():
        raise InputError(f"{store} is one adapter itself: `lora-fs register` takes it, or give its parent")
    return dict(sorted(found.items()))
