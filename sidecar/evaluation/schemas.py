"""Whether an answer is JSON that meets a JSON Schema, within a limit of time.

jsonschema searches with Python's regular expressions, which have no limit. Here the keywords that search
are others, with the searches of ``searching``.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

from lora_fs.sidecar.errors import OperatorError, install_extra
from lora_fs.sidecar.evaluation.searching import Clock, compiled, short

MOST_SCHEMAS: Final = 256  # kept ones
NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are data
BY_NAME: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


@lru_cache(maxsize=MOST_SCHEMAS)  # many cases have one schema, which takes a millisecond to check
def meets(written: str) -> Callable[[str], bool]:
    """Return the check of a schema, written as JSON; raises ValueError if no answer can meet it."""
    schema: dict[str, Any] | bool = json.loads(written)
    if schema is False or (
        isinstance(schema, dict) and (schema.get("enum") == [] or schema.get("not") in ({}, True))
    ):
        raise ValueError("no answer can meet this: the schema refuses everything")
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise OperatorError(f"json_schema needs jsonschema: {install_extra('evaluate')}") from error
    if isinstance(schema, dict) and not isinstance(schema.get("$schema", ""), str):
        raise ValueError("json_schema is no schema: $schema is no text")
    _check_patterns(schema)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"json_schema is no schema: {error.message}") from error
    referencing: Any = importlib.import_module("referencing")
    bounded = _Bounded()
    validator = bounded.of(kind)(schema, registry=referencing.Registry())  # one that fetches nothing
    examples: tuple[Any, ...] = (None, {}, [], "", 0)
    for example in examples:
        try:
            validator.is_valid(example)
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(f"no answer can meet this: the schema refers to {error.ref}") from error
        except RecursionError as error:
            raise ValueError("no answer can meet this: the schema refers to itself") from error
        except ArithmeticError:
            continue

    def check(answer: str) -> bool:
        bounded.clock = Clock()
        try:
            return bool(validator.is_valid(json.loads(answer, parse_constant=_refuse)))
        except (ValueError, ArithmeticError, RecursionError, referencing.exceptions.Unresolvable):
            return False

    return check


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _check_patterns(schema: Any) -> None:
    """Raise ValueError for a pattern that does not compile, or that nothing could limit."""
    keywords = set[str]()
    for keyword, value in _keywords(schema):
        keywords.add(keyword)
        patterns = [value] if keyword == "pattern" and isinstance(value, str) else list[str]()
        if keyword == "patternProperties" and isinstance(value, dict):
            patterns += value
        for pattern in patterns:
            try:
                compiled(pattern)
            except ValueError as error:
                raise ValueError(f"json_schema: pattern {short(pattern)} {error}") from error
    if keywords >= {"patternProperties", "unevaluatedProperties"}:
        raise ValueError(
            "json_schema has patternProperties and unevaluatedProperties, which together have no limit of "
            "time: write additionalProperties"
        )


def _keywords(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keywords of a schema and of its parts, with their values."""
    if isinstance(schema, dict):
        for keyword, value in schema.items():
            yield keyword, value
            if keyword in BY_NAME and isinstance(value, dict):
                yield from _keywords([*value.values()])
            elif keyword not in NO_SCHEMAS:
                yield from _keywords(value)
    elif isinstance(schema, list):
        for one in schema:
            yield from _keywords(one)


class _Bounded:
    """jsonschema's validators, with keywords whose searches share the time of ``clock``."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._kinds: dict[Any, Any] = {}
        self._validators: Any = importlib.import_module("jsonschema.validators")
        self._error: Any = importlib.import_module("jsonschema").ValidationError

    def of(self, kind: Any) -> Any:
        """Return the bounded validator of a draft; one already bounded stays."""
        if kind not in self._kinds:
            others = {
                "pattern": self._pattern,
                "patternProperties": self._pattern_properties,
                "additionalProperties": self._additional_properties,
            }
            used = {name: one for name, one in others.items() if name in kind.VALIDATORS}
            made = self._validators.extend(kind, used)
            made.evolve = self._evolving(made)
            self._kinds[kind] = self._kinds[made] = made
        return self._kinds[kind]

    def _evolving(self, made: Any) -> Callable[..., Any]:
        """The method that goes to a part of the schema; a part may name a draft of its own."""
        plain = made.evolve

        def evolve(validator: Any, **changes: Any) -> Any:
            evolved = plain(validator, **changes)
            kind = self.of(type(evolved))
            if kind is type(evolved):
                return evolved
            kept = {"registry": evolved._registry, "_resolver": evolved._resolver}
            return kind(evolved.schema, **kept)

        return evolve

    def _finds(self, pattern: str, text: str) -> bool:
        try:
            return self.clock.finds(pattern, text)
        except ValueError as error:
            raise OperatorError(f"json_schema: pattern {short(pattern)} {error}") from error

    def _pattern(self, validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
        if validator.is_type(instance, "string") and not self._finds(pattern, instance):
            yield self._error("does not match")

    def _pattern_properties(self, validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if self._finds(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)

    def _additional_properties(self, validator: Any, part: Any, instance: Any, schema: Any) -> Iterator[Any]:
        if not validator.is_type(instance, "object"):
            return
        patterns = schema.get("patternProperties", {})
        for name, value in instance.items():
            if name in schema.get("properties", {}) or any(self._finds(one, name) for one in patterns):
                continue
            yield from validator.descend(value, part, path=name)
