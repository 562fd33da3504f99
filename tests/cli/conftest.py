"""``lora-fs`` run in this process, by the entry point's own path from errors to exit codes."""

from __future__ import annotations

import datetime
import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

from lora_fs.sidecar.cli.main import cli, run
from lora_fs.sidecar.model import AdapterStatus, ChangedBy, EngineLimits, Phase, ReplicaStatus
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.volume import atomic
from tests.registry.conftest import write_adapter

MODEL = "tiny"
LORA_FS = str(Path(sys.executable).with_name("lora-fs"))  # the installed script


@dataclass(frozen=True)
class Ran:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


LoraFs = Callable[..., Ran]


@contextmanager
def interruptible() -> Iterator[None]:
    """Who is started in this block is ended by Ctrl-C, also where a shell told this process to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # no child inherits a handler
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def propose(*words: str) -> list[str]:
    """What a shell would propose for the last word, asked in this process."""
    completion = ShellComplete(cli, {}, "lora-fs", "_LORA_FS_COMPLETE")
    return [item.value for item in completion.get_completions(list(words[:-1]), words[-1])]


def parse(words: Sequence[str]) -> click.Context:
    """Parse a command line, ``lora-fs`` left out, by the real commands; raises what a user would be told."""
    group = click.Context(cli, info_name="lora-fs")
    _, rest, _ = cli.make_parser(group).parse_args(list(words))
    name, command, arguments = cli.resolve_command(group, rest)
    assert command is not None
    return command.make_context(name, arguments, parent=group)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a new registry is, exported as a user would."""
    folder = tmp_path / "volume"
    marker.create(folder)
    monkeypatch.setenv("LORA_FS_ROOT", str(folder))
    monkeypatch.setenv("LORA_FS_MODEL", MODEL)
    for name in ("FORCE_COLOR", "COLUMNS", "LORA_FS_NAMESPACE", "LORA_FS_ALLOWED_SOURCES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def bare(root: Path) -> Path:
    """The root before ``lora-fs init``: there is no such folder."""
    shutil.rmtree(root)
    return root


@pytest.fixture
def lora_fs(root: Path, capsys: pytest.CaptureFixture[str]) -> LoraFs:
    """``lora_fs("list", "-o", "json")``."""

    def call(*arguments: str) -> Ran:
        capsys.readouterr()
        code = run(list(arguments))
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[int], str]:
    """``folder(seed)``: an adapter's folder; equal seeds are equal bytes."""
    return lambda seed: str(write_adapter(tmp_path / f"lora-{seed}", seed))


def seen(name: str = "a", *, record: int = 1, pointer: int = 1, revision: str = "v1") -> dict[str, int]:
    """What a replica tells that has seen these generations of a name."""
    return {f"default/{MODEL}/{revision}/{name}": record, f"default/{MODEL}/.active/{name}": pointer}


@pytest.fixture
def report(root: Path) -> Callable[..., None]:
    """``report("a", recent={…}, phases={…})``: what a replica would have written just now."""

    def write(
        replica: str,
        *,
        recent: dict[str, int] | None = None,
        phases: dict[str, Phase] | None = None,
        namespaces: tuple[str, ...] = ("default",),
        age_s: float = 0,
        conditions: tuple[str, ...] = (),
        revision: str = "v1",
        generation: int = 1,
        engine: str = "ready",
        limits: EngineLimits | None = None,
        changed_by: ChangedBy | None = None,
    ) -> None:
        at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
        told = {
            name: AdapterStatus(
                key=(
                    "default",
                    MODEL,
                    name.partition("@")[2] or revision,
                    name.removeprefix("default/").partition("@")[0],
                ),
                generation=generation,
                phase=phase,
                message=f"{phase.value} it is",
            )
            for name, phase in (phases or {}).items()
        }
        status = ReplicaStatus(
            replica=replica,
            model=MODEL,
            namespaces=namespaces,
            engine=engine,
            updated_at=at.isoformat(),
            adapters=told,
            recent=recent or {},
            conditions=conditions,
            limits=limits,
            changed_by=changed_by,
        )
        (root / ".replicas").mkdir(parents=True, exist_ok=True)
        atomic.replace(root / ".replicas" / f"{replica}.json", seal(status))

    return write
