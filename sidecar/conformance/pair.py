"""Two mounts of one filesystem, an agent on each, and the scratch folder that they share.

The scratch folder is a temporary name in the root: readers of a registry pass it over, and
``lora-fs gc`` removes one that a killed suite left.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_fs.sidecar.conformance.agent import Agent
from lora_fs.sidecar.errors import InputError, NotFound, OperatorError, VolumeUnavailable
from lora_fs.sidecar.registry.format.layout import TEMPORARY
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.folders import make_folder
from lora_fs.sidecar.registry.volume.mounts import kind_of

SCRATCH = f"{TEMPORARY}doctor-"
ANSWER_S = 30.0  # beyond what a probe may take: a mount that is silent for longer hangs
_SIGN = "sign"
_REMOVE_S = 10.0
_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class Side:
    """One mount: who acts on it, and the scratch folder as its path is there."""

    agent: Agent
    folder: Path


@dataclass(frozen=True, slots=True)
class Pair:
    """``here`` writes, ``there`` observes. ``kinds``: their filesystems, as the kernel names them."""

    here: Side
    there: Side
    kinds: tuple[str, str]

    def make(self, name: str, seen_within_s: float) -> tuple[Path, Path]:
        """A folder of the scratch folder, on both sides, once ``there`` sees it."""
        here, there = self.here.folder / name, self.there.folder / name
        self.here.agent.call(ANSWER_S, make_folder, here)
        if not self.there.agent.call(seen_within_s + ANSWER_S, _wait_for_folder, there, seen_within_s):
            raise VolumeUnavailable(
                f"{there} does not show {seen_within_s:.0f} s after it was made as {here}"
            )
        return here, there


@contextmanager
def scratch(root: Path, peer: Path | None, seen_within_s: float) -> Iterator[Pair]:
    """Make the scratch folder and the agents; remove both at the end, whatever happened.

    Raises:
        NotFound: one of the folders is not there.
        InputError: they are not two mounts of one filesystem.
        VolumeUnavailable: the volume takes no write, or a mount does not answer.
        OperatorError: the scratch folder stays; says where it is.
    """
    name = SCRATCH + secrets.token_hex(8)
    here_agent = Agent(str(root))
    there_agent = Agent(str(peer or root), [here_agent])
    here, there = Side(here_agent, root / name), Side(there_agent, (peer or root) / name)
    try:
        kinds = (_kind(here_agent, root), _kind(there_agent, peer or root))
        try:
            token = here.agent.call(ANSWER_S, _begin, here.folder)
            told = there.agent.call(seen_within_s + ANSWER_S, _wait_for_token, there.folder, seen_within_s)
            if told != token:
                raise InputError(
                    f"what is written in {root} does not show in {peer} within {seen_within_s:.0f} s: "
                    "are they two mounts of one filesystem?"
                )
            yield Pair(here, there, kinds)
        finally:
            _remove_with_whoever_answers(here)
    finally:
        there.agent.end()
        here.agent.end()


def _remove_with_whoever_answers(here: Side) -> None:
    """By another agent: a probe may have left the first one silent, busy or asleep."""
    remover = Agent(here.agent.name, [here.agent])
    try:
        left = remover.call(ANSWER_S + _REMOVE_S, _remove, here.folder)
    except VolumeUnavailable as error:
        left = str(error)
    finally:
        remover.end()
    if left is not None:
        raise OperatorError(f"the scratch folder {here.folder} is left, remove it by hand: {left}")


def _kind(agent: Agent, folder: Path) -> str:
    kind = agent.call(ANSWER_S, _look_at, folder)
    if kind is None:
        raise NotFound(f"{folder} is no folder, or not there: is the volume mounted?")
    return kind


def _look_at(folder: Path) -> str | None:
    return kind_of(folder) if folder.is_dir() else None


def _begin(folder: Path) -> str:
    token = secrets.token_hex(16)
    try:
        os.mkdir(folder)
        (folder / _SIGN).write_text(token)
    except OSError as error:
        raise atomic.unavailable(error, f"cannot write in {folder.parent}") from error
    return token


def _wait_for_folder(folder: Path, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while not os.path.isdir(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _wait_for_token(folder: Path, wait_s: float) -> str:
    deadline = time.monotonic() + wait_s
    while True:
        data = atomic.read_bytes(folder / _SIGN) or b""
        if data or time.monotonic() > deadline:
            return data.decode(errors="replace")
        time.sleep(_LOOK_S)


def _remove(folder: Path) -> str | None:
    """Why it stays, if it does. Asks a lagging listing again."""
    deadline = time.monotonic() + _REMOVE_S
    while True:
        try:
            shutil.rmtree(folder)
            return None
        except FileNotFoundError:
            return None if not folder.exists() else "it is listed and not there"
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, *atomic.TRANSIENT):
                return str(error)
            if time.monotonic() > deadline:
                return str(error)
            time.sleep(_LOOK_S)
