"""What a case expects of an answer, and the score of one. Pure.

An answer must meet all checks of a case. A check that no answer can meet is refused at the start.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from lora_fs.sidecar.errors import OperatorError, install_extra

MOST_CHOICES: Final = 20  # vLLM gives so many likely tokens at most, unless it is set otherwise
MOST_SCHEMAS: Final = 256  # kept ones
REGEX_S: Final = 1.0
Text = Annotated[str, Field(min_length=1)]


class Expect(BaseModel):
    """What an answer must be; space at its ends never counts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    exact: Text | None = Field(None, description="The whole answer")
    contains: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = Field(
        None, description="A text, or several, all of which stand in the answer"
    )
    regex: Text | None = Field(None, description="A regular expression that matches somewhere in the answer")
    json_schema: dict[str, Any] | bool | None = Field(
        None, description="A JSON Schema that the answer, parsed as JSON, meets"
    )
    ignore_case: bool = Field(False, description="Of exact, contains and regex")
    choices: Annotated[tuple[Text, ...], Field(min_length=2, max_length=MOST_CHOICES)] | None = Field(
        None, description="Beginnings of the answer; the likeliest one, by log-probability, is the answer"
    )
    answer: Text | None = Field(None, description="The right one of the choices")
    _checks: tuple[Callable[[str], bool], ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _can_be_met(self) -> Expect:
        others = (self.exact, self.contains, self.regex, self.json_schema)
        if self.choices is not None:
            if any(one is not None for one in others):
                raise ValueError("choices stand alone")
            if self.answer not in self.choices:
                raise ValueError("no answer can meet this: the answer is none of the choices")
            if len({one.strip() for one in self.choices}) < len(self.choices):
                raise ValueError("no answer can meet this: two choices are the same")
            return self
        if self.answer is not None:
            raise ValueError("answer needs choices")
        self._checks = tuple(self._made())
        if not self._checks:
            raise ValueError("say what is expected: exact, contains, regex, json_schema or choices")
        if self.exact is not None and not self.met(self.exact):
            raise ValueError("no answer can meet this: the exact text does not meet the other checks")
        return self

    def met(self, answer: str) -> bool:
        """Whether an answer passes; not for choices."""
        return all(check(answer.strip()) for check in self._checks)

    def chosen(self, likely: Mapping[str, float]) -> bool:
        """Whether the right choice is the likeliest.

        Args:
            likely: log-probabilities of likely first tokens; a token counts for the one choice it begins.
        """
        best: dict[str, float] = {}
        for token, logprob in likely.items():
            begun = [
                one for one in self.choices or () if token.strip() and one.strip().startswith(token.strip())
            ]
            if len(begun) == 1:
                best[begun[0]] = max(logprob, best.get(begun[0], logprob))
        return bool(best) and max(best, key=lambda one: best[one]) == self.answer

    def _made(self) -> list[Callable[[str], bool]]:
        fold: Callable[[str], str] = str.casefold if self.ignore_case else str
        checks: list[Callable[[str], bool]] = []
        if self.exact is not None:
            whole = fold(self.exact.strip())
            checks.append(lambda answer: fold(answer) == whole)
        if self.contains is not None:
            parts = (self.contains,) if isinstance(self.contains, str) else self.contains
            folded = tuple(map(fold, parts))
            checks.append(lambda answer: all(part in fold(answer) for part in folded))
        if self.regex is not None:
            checks.append(_matches(self.regex, ignore_case=self.ignore_case))
        if self.json_schema is not None:
            checks.append(_meets(json.dumps(self.json_schema)))
        return checks


def _matches(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    try:
        regex: Any = importlib.import_module("regex")  # Python's own has no limit of time
    except ImportError as error:
        raise OperatorError(f"regex needs the package regex: {install_extra('evaluate')}") from error
    try:
        compiled = regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"regex does not compile: {error}") from error

    def check(answer: str) -> bool:
        try:
            return compiled.search(answer, timeout=REGEX_S) is not None
        except TimeoutError as error:
            told = ascii(pattern if len(pattern) <= 80 else pattern[:77] + "...")
            raise OperatorError(
                f"the regex {told} is not done with an answer after {REGEX_S:.0f} s: "
                "write it without repeats inside repeats"
            ) from error

    return check


@lru_cache(maxsize=MOST_SCHEMAS)  # many cases have one schema, which takes a millisecond to check
def _meets(written: str) -> Callable[[str], bool]:
    schema: dict[str, Any] | bool = json.loads(written)
    if schema is False or (
        isinstance(schema, dict) and (schema.get("enum") == [] or schema.get("not") in ({}, True))
    ):
        raise ValueError("no answer can meet this: the schema refuses everything")
    try:
        jsonschema: Any = importlib.import_module("jsonschema")
    except ImportError as error:
        raise OperatorError(f"json_schema needs jsonschema: {install_extra('evaluate')}") from error
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"json_schema is no schema: {error.message}") from error
    referencing: Any = importlib.import_module("referencing")
    validator = kind(schema, registry=referencing.Registry())  # one that fetches nothing
    examples: tuple[Any, ...] = (None, {}, [], "", 0)
    for example in examples:
        try:
            validator.is_valid(example)
        except referencing.exceptions.Unresolvable as error:
            raise ValueError(f"no answer can meet this: the schema refers to {error.ref}") from error

    def check(answer: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(answer)))
        except (ValueError, RecursionError, referencing.exceptions.Unresolvable):
            return False

    return check
