"""Completion in bash, which takes ``NAME@REVISION`` for three words."""

from __future__ import annotations

import os
from typing import Any

from click.shell_completion import BashComplete, CompletionItem, add_completion_class, split_arg_string


class Bash(BashComplete):
    """Complete as click does, with the words that bash split at an ``@`` made whole again.

    bash splits there if COMP_WORDBREAKS has an ``@``, as by default. It then replaces the word at the cursor
    from the ``@`` on, so a proposal begins there.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stays = 0  # characters of the word at the cursor that bash does not replace

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the one at the cursor, and that one."""
        words, at = split_arg_string(os.environ["COMP_WORDS"]), int(os.environ["COMP_CWORD"])
        at_cursor = [""] if at >= len(words) else []  # a new word, which is lost in the list
        whole, is_open = list[str](), False
        for word in (*words[1 : at + 1], *at_cursor):
            goes_on = bool(whole) and (word == "@" or (is_open and word != ""))
            self._stays = len(whole[-1].removesuffix("@")) if goes_on else 0
            if goes_on:
                whole[-1] += word
            else:
                whole.append(word)
            is_open = goes_on and word == "@"
        return whole[:-1], whole[-1]

    def format_completion(self, item: CompletionItem) -> str:
        """Return a line for bash: the type of a proposal, and what takes the place of the word."""
        return f"{item.type},{item.value[self._stays :]}"


def use() -> None:
    """Answer the shell that asks for proposals, or for its script, by these classes."""
    add_completion_class(Bash)
