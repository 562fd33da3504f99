"""Cases from a JSONL file, one a line. It streams: a million lines take no more memory than ten."""

from __future__ import annotations

import hashlib
import os.path
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lora_fs.sidecar import field_errors
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.evaluation.expectations import Expect, Text

MOST_LINE_BYTES: Final = 1 << 20
OF_A_UNION: Final = ("constrained-", "tuple[")  # how pydantic calls a union's members in a path
MOST_SHOWN: Final = 10  # broken lines that the error lists; it counts the others


class Message(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    role: Literal["system", "user", "assistant"]
    content: str


class Case(BaseModel):
    """One line: the question, and what its answer must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field("", max_length=200, description="For people; the line's number tells cases apart")
    prompt: Text | None = Field(None, description="Asked of /v1/completions")
    messages: Annotated[tuple[Message, ...], Field(min_length=1)] | None = Field(
        None, description="Asked of /v1/chat/completions"
    )
    expect: Expect | None = Field(None, description="Null: a command scores the answer")
    max_tokens: int = Field(64, ge=1, le=100_000, description="Most tokens of the answer")

    @model_validator(mode="after")
    def _one_of_both(self) -> Case:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("say prompt or messages, one of them")
        return self


@dataclass(frozen=True, slots=True)
class Data:
    """A data file all of whose lines are good."""

    path: Path
    sha256: str
    cases: int
    scored: bool

    def __iter__(self) -> Iterator[tuple[int, Case]]:
        """Yield each case with its line; raises InputError if the file changed after the check."""
        digest, count = hashlib.sha256(), 0
        for number, line in _lines(self.path):
            digest.update(line)
            if line.strip():
                count += 1
                yield number, _case(self.path, number, line, scored=self.scored)
        if (digest.hexdigest(), count) != (self.sha256, self.cases):
            raise InputError(f"{self.path} was changed while it was read: evaluate again")


def check(path: Path, *, scored: bool = False) -> Data:
    """Check every line before the first request.

    Args:
        scored: a command scores the answers: a case need not say what it expects.
    Raises:
        InputError: with file, line, field and reason of each broken line, the first few in full; or it is a
            pipe, which gives its lines once.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is no regular file, and cases are read twice: write them to a file")
    digest, count, broken = hashlib.sha256(), 0, list[str]()
    wrong = 0
    for number, line in _lines(path):
        digest.update(line)
        if not line.strip():
            continue
        try:
            _case(path, number, line, scored=scored)
            count += 1
        except InputError as error:
            wrong += 1
            if len(broken) < MOST_SHOWN:
                broken.append(str(error))
    if wrong > len(broken):
        broken.append(f"{path}: {wrong - len(broken)} more lines are broken")
    if broken:
        raise InputError("\n".join(broken))
    if not count:
        raise InputError(f"{path} holds no case: write one JSON object a line")
    return Data(path, digest.hexdigest(), count, scored)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with path.open("rb") as opened:
            while line := opened.readline(MOST_LINE_BYTES + 1):
                number += 1
                if len(line) > MOST_LINE_BYTES:
                    raise InputError(f"{path}:{number}: the line is longer than {MOST_LINE_BYTES >> 20} MiB")
                yield number, line
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def _case(path: Path, number: int, line: bytes, *, scored: bool) -> Case:
    try:
        case = Case.model_validate_json(line.rstrip().removeprefix(BOM_UTF8))
    except ValidationError as error:
        loc, why = field_errors.first(error, "JSON object")
        why = why.replace(" at line 1 column ", " at column ")  # a line of the JSON is all that there is
        field = ".".join(str(part) for part in loc if not str(part).startswith(OF_A_UNION))
        told = f"{shown(field)}: {why}" if field else why
        raise InputError(f"{path}:{number}: {told}") from error
    if case.expect is None and not scored:
        raise InputError(f"{path}:{number}: expect: is missing, and there is no --score-command")
    return case
