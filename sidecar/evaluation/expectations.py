"""What a case expects of an answer, and the score of one. Pure.

An answer must meet all checks of a case. A check that no answer can meet is refused at the start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from lora_fs.sidecar.evaluation.schemas import meets
from lora_fs.sidecar.evaluation.searching import Clock, compiled

MOST_CHOICES: Final = 20  # vLLM gives so many likely tokens at most, unless it is set otherwise
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
            self._tell_apart(self.choices)
            return self
        if self.answer is not None:
            raise ValueError("answer needs choices")
        self._checks = tuple(self._made())
        if not self._checks:
            raise ValueError("say what is expected: exact, contains, regex, json_schema or choices")
        if self.exact is not None and not self.met(self.exact):
            raise ValueError("no answer can meet this: the exact text does not meet the other checks")
        return self

    def _tell_apart(self, choices: tuple[str, ...]) -> None:
        """Refuse a choice that begins another: whatever token begins it may go on as the other one."""
        for one in sorted(choices, key=lambda one: one != self.answer):  # the right one first
            longer = next((other for other in choices if _begins(one, other)), None)
            if longer is not None:
                cannot = "no answer can meet this: " if one == self.answer else ""
                raise ValueError(
                    f"{cannot}choice {one!a} begins choice {longer!a}, and the first token decides: "
                    "begin each choice differently, such as A, B and C"
                )

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
            checks.append(meets(json.dumps(self.json_schema)))
        return checks


def _begins(one: str, other: str) -> bool:
    return one is not other and other.strip().startswith(one.strip())


def _matches(pattern: str, *, ignore_case: bool) -> Callable[[str], bool]:
    try:
        compiled(pattern, ignore_case=ignore_case)
    except ValueError as error:
        raise ValueError(f"regex {error}") from error
    return lambda answer: Clock().finds(pattern, answer, ignore_case=ignore_case)
