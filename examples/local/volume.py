"""The shared folder, and the ``lora-fs`` command run on it as a user would.

Imports nothing of lora-fs: what is run is the installed script, with the environment a user
would export.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lora_fs.demo.failures import DemoFailed
from lora_fs.demo.process import child_environment

LORA_FS = str(Path(sys.executable).with_name("lora-fs"))
NAMESPACE = "default"
_COMMAND_LIMIT_S = 60


@dataclass(frozen=True, slots=True)
class Ran:
    """A ``lora-fs`` command that has ended."""

    arguments: tuple[str, ...]
    exit_code: int
    stdout: str
    stderr: str


class CommandFailed(DemoFailed):
    """A ``lora-fs`` command that had to succeed did not."""

    def __init__(self, ran: Ran) -> None:
        command = " ".join(("lora-fs", *ran.arguments))
        super().__init__(f"{command} ended with {ran.exit_code}\n{ran.stdout}{ran.stderr}")
        self.ran = ran


class CommandHung(CommandFailed):
    """A ``lora-fs`` command had not ended after ``_COMMAND_LIMIT_S``, and was ended."""


@dataclass(frozen=True, slots=True)
class Volume:
    """The shared folder, and ``lora-fs`` run on it as a user would.

    Attributes:
        root: the registry's root.
        model: what the base model is served as.
        cwd: the folder commands run in.
    """

    root: Path
    model: str
    cwd: Path

    @property
    def env(self) -> dict[str, str]:
        """What a user would export once."""
        return {"LORA_FS_ROOT": str(self.root), "LORA_FS_MODEL": self.model}

    @property
    def scope_dir(self) -> Path:
        """Where the revisions lie: ``<root>/<namespace>/<model>``."""
        return self.root / NAMESPACE / self.model

    def run(self, *arguments: str) -> Ran:
        """Run ``lora-fs ARGUMENTS`` to success.

        Raises:
            CommandFailed: its exit code is not 0.
        """
        ran = self.try_run(*arguments)
        if ran.exit_code != 0:
            raise CommandFailed(ran)
        return ran

    def try_run(self, *arguments: str) -> Ran:
        """Run ``lora-fs ARGUMENTS`` to its end, whatever its exit code.

        Raises:
            CommandHung: it did not end, and what it was doing.
        """
        pipe = subprocess.PIPE
        environment = child_environment(self.env | {"PYTHONFAULTHANDLER": "1"})
        with subprocess.Popen(
            [LORA_FS, *arguments], cwd=self.cwd, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as child:
            try:
                stdout, stderr = child.communicate(timeout=_COMMAND_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGABRT)  # at which Python tells where its threads are
                stdout, stderr = child.communicate()
                raise CommandHung(Ran(arguments, child.returncode, stdout, stderr)) from None
            except BaseException:
                child.kill()
                raise
        return Ran(arguments, child.returncode, stdout, stderr)
