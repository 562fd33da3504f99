"""The base of every type on the volume: frozen, small in memory, keeps unknown fields."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, TypeAdapter

API_VERSION = "lora-fs/v1"

JsonObject = dict[str, Any]

_FIELD_SETS: dict[frozenset[str], set[str]] = {}
_MOST_FIELD_SETS = 1_024
_SHAPES: dict[type, type] = {}
_NO_EXTRA: dict[str, Any] = {}  # nobody writes to it: models are frozen, and a copy copies it


def one_by_one(kind: type) -> BeforeValidator:
    """Stop at the first value that is none: of a file with a million, an error each took gigabytes."""
    of_one: TypeAdapter[Any] = TypeAdapter(kind)

    def each(value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: of_one.validate_python(item) for name, item in value.items()}

    return BeforeValidator(each)


class Stored(BaseModel):
    """A type on the volume: frozen, and fields of a newer writer survive.

    A replica may hold 100,000 records. So records share what many have alike: text in ``_alike`` fields, the
    set of given fields, the names of fields (in a dict that knows its class's), and having no others.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    _alike: ClassVar[tuple[str, ...]] = ()

    def model_post_init(self, context: Any) -> None:
        """Make it small: of 8.5 KB that an adapter took in memory 4 are left."""
        kind = type(self)
        if kind not in _SHAPES:
            _SHAPES[kind] = type("_Shape", (), {})
        shape = _SHAPES[kind]()
        values = self.__dict__
        for name in self._alike:
            if type(text := values.get(name)) is str:
                values[name] = sys.intern(text)
        for name, value in values.items():
            setattr(shape, name, value)
        object.__setattr__(self, "__dict__", shape.__dict__)
        if not self.__pydantic_extra__:
            object.__setattr__(self, "__pydantic_extra__", _NO_EXTRA)
        given = self.__pydantic_fields_set__
        if len(_FIELD_SETS) < _MOST_FIELD_SETS:  # unknown fields are anybody's choice
            shared = _FIELD_SETS.setdefault(frozenset(given), given)
            object.__setattr__(self, "__pydantic_fields_set__", shared)
