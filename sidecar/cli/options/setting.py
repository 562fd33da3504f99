"""Options made from settings: variable, type, default and help are those of the field.

The settings are pydantic's. So only a command that needs pydantic anyway takes its options from here.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from lora_fs.sidecar.cli.options.command import Setting
from lora_fs.sidecar.cli.options.values import Duration, Place, Size
from lora_fs.sidecar.settings import Settings, variables

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_UNITS: Final = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
_BINARY: Final = (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10), ("", 1))


def setting(name: str, *words: str, **attributes: Any) -> Callable[[_Decorated], _Decorated]:
    """Make the option of ``Settings.name``.

    Args:
        words: its spelling, by default ``--name``.
        attributes: click's, in place of what the field says.
    """
    field = Settings.model_fields[name]
    assert field.description is not None, f"{name} has no description"
    made = {
        "type": _type(name, _plain(field.annotation)),
        "help": field.description,
        "envvar": variables(name),
        "shown_default": _shown(name, field),
    }
    written = [*(words or (f"--{name.replace('_', '-')}",)), name]
    return click.option(*written, cls=Setting, **made | attributes)


def _plain(annotation: Any) -> Any:
    """The type without ``| None``."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    return kinds[0] if type(None) in get_args(annotation) else annotation


def _type(name: str, kind: Any) -> click.ParamType[Any]:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return click.Choice([one.value for one in kind])
    if kind is Path:
        return Place()
    if name.endswith("_bytes"):
        return Size()
    if name.endswith("_s"):
        return Duration(whole=kind is int)
    return click.INT if kind is int else click.STRING


def _shown(name: str, field: FieldInfo) -> str:
    """The default in an option's spelling; empty if there is none."""
    default = field.default
    if field.default_factory is not None or default in (None, ()):
        return ""
    units = _BINARY if name.endswith("_bytes") else _UNITS if name.endswith("_s") else ()
    for unit, size in units if default else ():
        if default % size == 0:
            return f"{default / size:g}{unit}"
    return str(default.value if isinstance(default, Enum) else default)
