"""What a command imports: a page of help needs neither pydantic nor a server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Phase
from tests.cli.conftest import LORA_FS, LoraFs

HEAVY = (
    "aiohttp",
    "asyncio",
    "fastapi",
    "huggingface_hub",
    "lora_fs.sidecar.model",
    "lora_fs.sidecar.settings",
    "numpy",
    "pydantic",
    "pydantic_settings",
    "rich",
    "uvicorn",
    "vllm",
    "watchdog",
    "yaml",
)
NOT_OF_A_LOOK = (
    "aiohttp",
    "anyio",
    "asyncio",
    "fastapi",
    "filelock",
    "huggingface_hub",
    "lora_fs.sidecar.validate",
    "numpy",
    "pydantic_settings",
    "rich.console",
    "ssl",
    "subprocess",
    "uvicorn",
    "vllm",
    "watchdog",
    "yaml",
)
# A list of records says nothing of replicas, and a table in ASCII asks for no character's width.
NOT_OF_A_LIST = (
    "concurrent.futures",
    "lora_fs.sidecar.model.status",
    "lora_fs.sidecar.registry.store.writer",
    "rich",
)
MOST_MODULES = 160  # of --help, the interpreter's own included; 372 before
MOST_OF_A_LOOK = 305  # 295 of status, 294 of list; the environment itself imports some


def imported(*words: str) -> set[str]:
    """The modules that are there after a command line."""
    code = (
        "import sys; from lora_fs.sidecar.cli.main import run; code = run(sys.argv[1:]);"
        "print('\\n' + ' '.join(sys.modules), file=sys.stderr); sys.exit(code)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    return set(ran.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("words", [["--help"], ["help"], ["version"], ["--version"]], ids=" ".join)
def test_help_is_light(words: list[str]) -> None:
    """It imports no library that only some commands need, and few modules at all."""
    modules = imported(*words)
    assert sorted(modules & set(HEAVY)) == []
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("words", ["list", "show a", "status", "unregister a --dry-run"])
def test_a_look_at_the_registry_is_light(
    lora_fs: LoraFs, folder: Callable[[int], str], report: Callable[..., None], words: str
) -> None:
    """It needs no event loop, no server, no hub, and nothing that locks, draws or reads tensors."""
    assert lora_fs("register", "a", folder(1)).code == 0
    report("pod", phases={"a": Phase.READY})
    modules = imported(*words.split())
    assert sorted(modules & set(NOT_OF_A_LOOK)) == []
    assert len(modules) <= MOST_OF_A_LOOK


def test_a_list_imports_nothing_of_replicas(lora_fs: LoraFs, folder: Callable[[int], str]) -> None:
    """It shows records: neither the types of a replica's status nor the widths of characters."""
    assert lora_fs("register", "a", folder(1)).code == 0
    assert sorted(imported("list") & set(NOT_OF_A_LIST)) == []


@pytest.mark.parametrize("words", ["--help", "list"])
def test_no_garbage_is_collected_while_a_command_loads(root: Path, words: str) -> None:
    """The collector starts with the command's work, and the exit leaves it nothing to look at."""
    code = (
        "import atexit, gc, sys; from lora_fs.sidecar.cli.main import main; sys.argv.pop(0); on = set();"
        "find = lambda name, *_: on.add(gc.isenabled()) if name == 'pydantic' else None;"
        "sys.meta_path.insert(0, type('Finder', (), {'find_spec': find}));"
        "atexit.register(lambda: print(f'\\ncollects {on - {False}}, left {len(gc.get_objects()) // 1000}'));"
        "main()"
    )
    command = [sys.executable, "-c", code, "lora-fs", words]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told[-1] == "collects set(), left 0"


def test_the_collector_works_with_a_command(root: Path) -> None:
    """A command that runs for days frees its garbage."""
    code = (
        "import gc, sys; from lora_fs.sidecar.cli import main;"
        "from lora_fs.sidecar.cli.options import context; sys.argv = ['lora-fs', 'list'];"
        "context.Context.scopes = lambda *_, **__: sys.exit(str(gc.isenabled())); main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stderr.splitlines()[-1] == "True"


def test_no_plugin_of_pydantic_is_loaded(root: Path, tmp_path: Path) -> None:
    """To look for one the command would read the metadata of each package that is installed."""
    about = tmp_path / "site" / "plugged-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[pydantic]\nplugged = plugged:it\n")
    (about.parent / "plugged.py").write_text("import sys; it = print('loaded', file=sys.stderr)")
    environment = {**os.environ, "PYTHONPATH": str(about.parent)}
    ran = subprocess.run([LORA_FS, "list", "-o", "name"], env=environment, capture_output=True, check=True)
    assert b"loaded" not in ran.stderr
