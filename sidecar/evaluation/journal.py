"""The state of a running evaluation: a file, a line a case. The next run resumes from it.

Its first line says what the run evaluates. A run refuses a journal of something else, or that another run
writes, and asks again for a last line that a crash cut.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lora_fs.sidecar.errors import InputError, OperatorError
from lora_fs.sidecar.evaluation.comparison import Result

_ABOUT = TypeAdapter(dict[str, str])


class _Case(BaseModel):
    """A line of the journal after the first."""

    model_config = ConfigDict(strict=True)

    line: int
    id: str
    results: tuple[Result, ...]


class Journal:
    """The journal of one evaluation.

    Args:
        about: the run's subject: equal, in the same order, for a run that resumes this one.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self._path, self._about = path, dict(about)
        self._out: IO[bytes] | None = None

    def known(self) -> Iterator[tuple[int, str, tuple[Result, ...]]]:
        """Yield each case's line, its id and its results, and open the journal to add to.

        Raises:
            InputError: it is another evaluation's, another run writes it, or it cannot be read or written.
        """
        try:
            self._out = self._path.open("a+b")
            fcntl.flock(self._out, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its end frees it
            end = yield from self._read(self._out)
            self._out.truncate(end)
        except BlockingIOError as error:
            raise InputError(f"{self._path}: another evaluation writes it: name another --journal") from error
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror or error}: name another --journal") from error
        if end == 0:
            self._write(self._about)

    def add(self, line: int, case_id: str, results: tuple[Result, ...]) -> None:
        """Keep the results of a case; raises OperatorError, as on a full disk."""
        self._write({"line": line, "id": case_id, "results": [asdict(one) for one in results]})

    def close(self, *, done: bool) -> None:
        """End it; ``done``: nobody goes on with it."""
        if self._out is not None:
            with suppress(OSError):  # a full disk, which ``add`` reported
                self._out.close()
        if done:
            with suppress(OSError):
                os.unlink(self._path)

    def _write(self, value: Mapping[str, object]) -> None:
        assert self._out is not None
        try:
            self._out.write(json.dumps(value).encode() + b"\n")
            self._out.flush()
        except OSError as error:
            raise OperatorError(f"{self._path}: {error.strerror or error}: the journal ends there") from error

    def _read(self, lines: IO[bytes]) -> Generator[tuple[int, str, tuple[Result, ...]], None, int]:
        """Yield what whole lines say; returns where they end."""
        end = 0
        lines.seek(0)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            try:
                if end == 0 and [*_ABOUT.validate_json(line).items()] != [*self._about.items()]:
                    raise InputError(
                        f"{self._path} is the journal of another evaluation: remove it, or name another "
                        "--journal"
                    )
                if end:
                    case = _Case.model_validate_json(line)
                    yield case.line, case.id, case.results
            except ValidationError as error:
                raise InputError(f"{self._path} is no journal of an evaluation: remove it") from error
            end += len(line)
        return end
