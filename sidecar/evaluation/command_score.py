"""Scores an answer by a command of the user's: the case and the answer go in, a number from 0 to 1 comes out.

A command that fails says nothing of the revision: the evaluation ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
from contextlib import suppress
from typing import Final

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.evaluation.asking import Answer
from lora_fs.sidecar.evaluation.cases import Case

SCORE_S: Final = 60.0


class ByCommand:
    """Scores answers with one command line, run without a shell."""

    def __init__(self, command: str, timeout_s: float = SCORE_S) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise InputError(f"--score-command {command!a}: {error}") from error
        if not self._words:
            raise InputError("--score-command is empty")
        self._what, self._timeout_s = f"--score-command {self._words[0]}", timeout_s

    async def __call__(self, case: Case, answer: Answer) -> float:
        """Return what it prints; raises InputError: it failed, or printed no such number."""
        sent = json.dumps({"case": case.model_dump(mode="json", exclude_none=True), "answer": answer.text})
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._words, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except OSError as error:
            raise InputError(f"{self._what}: {error.strerror or error}") from error
        try:
            async with asyncio.timeout(self._timeout_s):
                out, err = await process.communicate(sent.encode())
        except BaseException as error:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started holds the pipes, too
            await process.communicate()
            if isinstance(error, TimeoutError):
                raise InputError(f"{self._what} took more than {self._timeout_s:g} s") from error
            raise
        if process.returncode != 0:
            why = shown(err.decode(errors="replace")[-500:])
            raise InputError(f"{self._what} exits {process.returncode}: {why}")
        try:
            score = float(out)
        except ValueError:
            score = -1.0
        if not 0.0 <= score <= 1.0:
            printed = shown(out.decode(errors="replace")[:100])
            raise InputError(f"{self._what} printed {printed!a}: print a number from 0 to 1")
        return score
