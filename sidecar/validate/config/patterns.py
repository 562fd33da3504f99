"""Run the regular expressions of an adapter's config within a bound of time.

PEFT lets ``target_modules``, ``rank_pattern`` and ``alpha_pattern`` hold regular expressions,
and vLLM runs the patterns' keys on every module name inside the engine. An adapter is input:
this module refuses an expression whose backtracking could get out of hand before it runs. Any other
compiles and runs only as long as the budget lasts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping

BUDGET_S = 5.0
MAX_LENGTH = 2_000
# A match costs at most about len(name) ** choices steps, vLLM's own prefix being one choice.
MAX_CHOICES_IN_KEY = 3
MAX_CHOICES_IN_TARGET = 4
MAX_NAME_LENGTH = 128
MAX_KEYS = 2_000  # of a pattern; an adapter of 126 layers with a key for each module has 882
# vLLM's library keeps 500 expressions compiled, vLLM's others included. With more keys vLLM compiles keys
# again for each module, in about 0.2 ms each. Source: regex 2026, ``_main.py::_MAXCACHE``.
KEPT_COMPILED = 400

_ESCAPE = re.compile(r"\\.", re.DOTALL)
_LAZY = re.compile(r"([*+?}])\?")
_CHOICE = re.compile(r"[*+?{(]")
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_FUZZY = re.compile(r"\{(?!\d*,?\d*\})")  # x{e<=1} is text to Python and PEFT; vLLM's library allows errors
_SET = re.compile(r"\[\^?\]?[^\]]*")
_OF_SETS = re.compile(r"^\[\[|--|&&|~~|\|\|")  # what Python warns of: it may mean these to a later one


class TooCostly(Exception):
    """The budget is spent; becomes a finding and never leaves ``validate``."""


class Budget:
    """Seconds of this thread's processor time that the matches of one validation may take together."""

    def __init__(self, limit_s: float = BUDGET_S, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock, self._end = clock, clock() + limit_s

    def check(self) -> None:
        """Raise TooCostly once the budget is spent."""
        if self._clock() > self._end:
            raise TooCostly


def objection(expression: str, max_choices: int) -> str | None:
    """Say why an expression is not run, or None when it may be.

    Counts the places where a match can go more than one way: a repeat, an optional part, a group.
    Refuses a repeated group, which makes backtracking exponential. Refuses what Python would
    warn of before it compiles it.
    """
    if len(expression) > MAX_LENGTH:
        return f"is longer than {MAX_LENGTH} characters"
    bare = _ESCAPE.sub("x", expression).replace("(?:", "(")
    if "(?" in bare or re.search(r"\\[1-9]", expression):
        return "uses look-around, inline flags or a back-reference"
    if _FUZZY.search(bare):
        return "has braces that are no number of repeats"
    if any(_OF_SETS.search(one) for one in _SET.findall(bare)):
        return "has [[, --, &&, ~~ or || in a set of characters, which not every Python reads alike"
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return f"is not a regular expression: {error}"
    bare = _LAZY.sub(r"\1", bare)
    if _REPEATED_GROUP.search(bare):
        return "repeats a group, which can take exponential time"
    if len(_CHOICE.findall(bare)) > max_choices:
        return f"has more than {max_choices} repeats and groups"
    return None


class ModulePatterns:
    """A ``rank_pattern`` or ``alpha_pattern``: the first key that matches a module wins.

    A key matches as a suffix of the module's name that begins at a dot.
    Source: vllm 0.32, ``lora/peft_helper.py::PEFTHelper._match_pattern``.
    """

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values
        self._compiled: list[tuple[re.Pattern[str], float]] | None = None

    def find(self, module: str, budget: Budget) -> float | None:
        """Return the value of the first key that matches, or None.

        Raises:
            TooCostly: the budget is spent, or the name is longer than any real one.
        """
        if self._values and len(module) > MAX_NAME_LENGTH:
            raise TooCostly
        if self._compiled is None:
            self._compiled = list(self._compile(budget))
        for expression, value in self._compiled:
            budget.check()
            if expression.match(module):
                return value
        return None

    def _compile(self, budget: Budget) -> Iterator[tuple[re.Pattern[str], float]]:
        for key, value in self._values.items():
            budget.check()
            yield re.compile(rf"(.*\.)?({key})$"), value


class TargetModules:
    """``target_modules``: a list of suffixes, one regular expression, or "all-linear".

    Source: peft 0.21, ``tuners/tuners_utils.py::check_target_module_exists``.
    """

    def __init__(self, target: tuple[str, ...] | str) -> None:
        self._suffixes = frozenset(target) if isinstance(target, tuple) else frozenset()
        self._anything = target == "all-linear"
        self._expression = re.compile(target) if isinstance(target, str) and not self._anything else None

    def covers(self, module: str, budget: Budget) -> bool:
        """Whether PEFT puts a LoRA on the module. Raises TooCostly."""
        if self._anything:
            return True
        budget.check()
        if self._expression is not None:
            if len(module) > MAX_NAME_LENGTH:
                raise TooCostly
            return self._expression.fullmatch(module) is not None
        return any(suffix in self._suffixes for suffix in suffixes(module))


def suffixes(module: str) -> Iterator[str]:
    """Yield a name and its suffixes at dots: ``a.b.c`` → ``a.b.c``, ``b.c``, ``c``."""
    yield module
    at = module.find(".")
    while at >= 0:
        yield module[at + 1 :]
        at = module.find(".", at + 1)
