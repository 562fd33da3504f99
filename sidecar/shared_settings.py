"""The settings that every command takes: variables, defaults and help, for settings and options alike.

Nothing here imports pydantic, which takes longer to import than a page of help takes to print.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Shared(NamedTuple):
    """One of them.

    Attributes:
        help: what it is.
        default: empty where there is none.
        alias: a variable that the field already uses for it, which counts after its own.
    """

    help: str
    default: str = ""
    alias: str = ""


SHARED: Final = {
    "root": Shared("The registry's folder", alias="DYNAMO_LORA_PATH"),
    "server": Shared("A sidecar that has the volume, in place of --root"),
    "client_token_file": Shared("With --server: a file with the token to show"),
    "namespace": Shared("Tenant; `sidecar` takes several", default="default"),
    "model": Shared("Base model: hub id, path or served name"),
    "base_config": Shared("The base model's config.json, or its folder"),
}


def variable(name: str) -> str:
    """Return a setting's own variable, ``LORA_FS_ROOT``."""
    return f"LORA_FS_{name.upper()}"


def variables(name: str) -> list[str]:
    """Return the variables of a shared setting, the one that counts first."""
    return [one for one in (variable(name), SHARED[name].alias) if one]
