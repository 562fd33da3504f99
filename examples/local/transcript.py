"""What the demo prints: numbered steps, the commands as typed, checked facts, timings.

Owns the form of the transcript. In colour on a terminal, plain text in a pipe or a log.
A check that fails ends the demo; nothing is printed as done that was not checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from lora_fs.demo.failures import DemoFailed


class CheckFailed(DemoFailed):
    """A step did not show what it promised."""


class Transcript:
    """Prints one run of the demo."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._steps = 0

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Number and time what happens in the block."""
        self._steps += 1
        self._print(f"\n{self._steps}. {title}", "bold")
        began = time.monotonic()
        yield
        self._print(f"   done in {time.monotonic() - began:.1f} s", "dim")

    def say(self, text: str) -> None:
        """Explain, in a sentence."""
        self._print(_indented(text))

    def command(self, line: str) -> None:
        """Show what a user would type."""
        self._print(_indented(f"$ {line}"), "cyan")

    def output(self, text: str) -> None:
        """Show what a command printed."""
        if text.strip():
            self._print(_indented(text.rstrip()), "dim")

    def check(self, fact: str, holds: bool, otherwise: str = "") -> None:
        """Print ``fact`` if it holds.

        Raises:
            CheckFailed: it does not; says ``fact`` and what was seen instead.
        """
        if not holds:
            raise CheckFailed(f"this should hold and does not: {fact}\n{otherwise}".rstrip())
        self._print(f"   ✓ {fact}", "green")

    def title(self, text: str) -> None:
        """The first line."""
        self._print(text, "bold")

    def failed(self, text: str) -> None:
        """The last line of a run that failed."""
        self._print(f"\nFAILED: {text}", "bold red")

    def finished(self) -> None:
        """The last line of a run in which every check held."""
        elapsed_s = time.monotonic() - self._began
        self._print(f"\nAll {self._steps} steps held, in {elapsed_s:.0f} s.", "bold green")

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style))


def _indented(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.splitlines())
