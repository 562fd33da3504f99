"""The state of a running evaluation: a file, a line a case. The next run resumes from it.

Its first line says what the run evaluates. It refuses a journal of something else, and asks again for a last
line that a crash cut.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.evaluation.comparison import Result


class Journal:
    """The journal of one evaluation.

    Args:
        about: the run's subject: equal for a run that resumes this one.
    """

    def __init__(self, path: Path, about: Mapping[str, str]) -> None:
        self._path, self._about = path, dict(about)
        self._out: IO[str] | None = None

    def known(self) -> Iterator[tuple[int, str, tuple[Result, ...]]]:
        """Yield each case's line, its id and its results, and open the journal to add to.

        Raises:
            InputError: it is another evaluation's, or cannot be read or written.
        """
        try:
            end = yield from self._read()
            self._out = self._path.open("a", encoding="utf-8")
            self._out.truncate(end)
            if end == 0:
                self._write(self._about)
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror or error}: name another --journal") from error

    def add(self, line: int, case_id: str, results: tuple[Result, ...]) -> None:
        """Keep the results of a case."""
        self._write({"line": line, "id": case_id, "results": [asdict(one) for one in results]})

    def close(self, *, done: bool) -> None:
        """End it; ``done``: nobody goes on with it."""
        if self._out is not None:
            self._out.close()
        if done:
            with suppress(OSError):
                os.unlink(self._path)

    def _write(self, value: Mapping[str, object]) -> None:
        assert self._out is not None
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()

    def _read(self) -> Generator[tuple[int, str, tuple[Result, ...]], None, int]:
        """Yield what whole lines say; returns where they end."""
        end = 0
        with suppress(FileNotFoundError), self._path.open("rb") as opened:
            for line in opened:
                if not line.endswith(b"\n"):
                    break
                try:
                    value = json.loads(line)
                    if end == 0 and value != self._about:
                        raise InputError(
                            f"{self._path} is the journal of another evaluation: remove it, or name another "
                            "--journal"
                        )
                    if end:
                        yield value["line"], value["id"], tuple(Result(**one) for one in value["results"])
                except (ValueError, TypeError, KeyError) as error:
                    raise InputError(f"{self._path} is no journal of an evaluation: remove it") from error
                end += len(line)
        return end
