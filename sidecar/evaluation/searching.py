"""Regular expressions with a limit of processor time: Python's own have none. Pure but for the clock."""

from __future__ import annotations

import importlib
import time
from functools import lru_cache
from typing import Any, Final

from lora_fs.sidecar.errors import OperatorError, install_extra

REGEX_S: Final = 1.0  # of all searches in one answer
MOST_PATTERNS: Final = 1024  # kept ones
MOST_SHOWN: Final = 80  # characters of one that an error has


@lru_cache(maxsize=MOST_PATTERNS)
def compiled(pattern: str, *, ignore_case: bool = False) -> Any:
    """Compile a regular expression; raises ValueError if it is none."""
    try:
        regex: Any = importlib.import_module("regex")
    except ImportError as error:
        raise OperatorError(f"regex needs the package regex: {install_extra('evaluate')}") from error
    try:
        return regex.compile(pattern, regex.IGNORECASE if ignore_case else 0)
    except (regex.error, RecursionError, OverflowError) as error:
        raise ValueError(f"does not compile: {error}") from error


def short(pattern: str) -> str:
    """Return a pattern for a message."""
    return ascii(pattern if len(pattern) <= MOST_SHOWN else pattern[: MOST_SHOWN - 3] + "...")


class Clock:
    """The processor time that the searches in one answer have left, on a busy machine as on an idle one."""

    def __init__(self) -> None:
        self._limit_s, self._ends_at = REGEX_S, time.process_time() + REGEX_S

    def finds(self, pattern: str, text: str, *, ignore_case: bool = False) -> bool:
        """Whether a pattern matches somewhere in a text.

        Raises:
            OperatorError: the time is used up. ValueError: the pattern does not compile.
        """
        expression = compiled(pattern, ignore_case=ignore_case)
        try:
            left_s = self._ends_at - time.process_time()  # as regex counts it
            if left_s <= 0:
                raise TimeoutError
            return expression.search(text, timeout=left_s) is not None
        except TimeoutError as error:
            raise OperatorError(
                f"the regex {short(pattern)} is not done with an answer after {self._limit_s:g} s: "
                "write it without repeats inside repeats"
            ) from error
