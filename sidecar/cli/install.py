"""install-plugin: put the plugin into a folder, for a vLLM in another container or image.

Promise: with ``PYTHONPATH=DIR`` a vLLM finds one version as a whole, or none. A version is written apart and
complete before one rename shows it, also where DIR is a mount point, which cannot be renamed itself:

    DIR/lora_fs            -> .lora-fs/current/lora_fs     one such link a top-level name; they stay
    DIR/.lora-fs/current   -> 0.1.0-x3k8q2w_               the one that is swapped
    DIR/.lora-fs/0.1.0-x3k8q2w_/                           the version, plain files

Nothing in DIR that is not this command's is touched. What a killed run left, the next one removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import click
from filelock import FileLock, Timeout

from lora_fs.sidecar.cli import bundle, parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.errors import Conflict, InputError, OperatorError

STATE, CURRENT, LOCK = ".lora-fs", "current", "lock"
WAIT_S = 30.0
WITHOUT_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


@click.command("install-plugin")
@click.argument("dir", type=parameters.Place())
@parameters.output
@click.pass_obj
def install_plugin(context: Context, dir: Path, output: str) -> None:
    """Copy the vLLM plugin, with what it needs and vLLM lacks, to DIR for another container's vLLM.

    \b
    Examples:
      lora-fs install-plugin /plugin
      lora-fs install-plugin /plugin -o json
    """
    folder = dir.absolute()
    parts = bundle.collect()
    replaced = install(folder, parts)
    ours, extras = parts[0], {part.name: part.version for part in parts[1:]}
    settings = context.settings
    needed = {
        "PYTHONPATH": (str(folder), ""),
        "VLLM_PLUGINS": ("lora_fs", ""),
        "LORA_FS_ROOT": (str(settings.root) if settings.root else None, "the registry's folder"),
        "LORA_FS_MODEL": (settings.model, "the base model, as vLLM's --model"),
        "LORA_FS_STAGE_DIR": (str(settings.stage_dir), "a local folder that vLLM may write to"),
    }
    if output == "json":
        context.emit(
            {
                "path": str(folder),
                "version": ours.version,
                "replaced": replaced,
                "extras": extras,
                "vllm": list(bundle.tested()),
                "environment": {name: value for name, (value, _) in needed.items()},
            }
        )
        return
    along = ", ".join(f"{name} {version}" for name, version in extras.items())
    was = f", in place of {replaced}" if replaced else ""
    context.say(f"installed lora-fs {ours.version} in {folder}{was}; with it {along}")
    context.say(f"tested on vLLM {', '.join(bundle.tested())}; vLLM's environment needs:")
    for name, (value, note) in needed.items():
        context.say(f"  {name}={value or '...'}" + (f"  # {note}" if note else ""))


def install(folder: Path, parts: tuple[bundle.Part, ...]) -> str | None:
    """Put the parts into ``folder`` in one step; returns the version that was there before."""
    if os.pathsep in str(folder):
        raise InputError(f"{folder}: PYTHONPATH cannot name a path with {os.pathsep!r} in it, choose another")
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder} is there and is no folder: name one, or what is to become one")
    state = folder / STATE
    for place in (folder, state):
        if not place.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(0o755)  # the engine may run as somebody else
    try:
        with FileLock(state / LOCK, timeout=WAIT_S):
            return _install(folder, parts)
    except Timeout:
        raise OperatorError(
            f"another install-plugin has been at work in {folder} for {WAIT_S:.0f} s"
        ) from None


def _install(folder: Path, parts: tuple[bundle.Part, ...]) -> str | None:
    names = {path.partition("/")[0] for part in parts for path in part.files}
    for name in sorted(names):
        if os.path.lexists(folder / name) and not _ours(folder / name):
            raise Conflict(
                f"{folder / name} is there and is not lora-fs's: name a folder of the plugin's own"
            )
    state, current = folder / STATE, folder / STATE / CURRENT
    replaced = os.readlink(current).rpartition("-")[0] if current.is_symlink() else None
    tree = Path(tempfile.mkdtemp(prefix=f"{parts[0].version}-", dir=state))
    try:
        bundle.write(parts, tree)
        for name in names - {entry.name for entry in folder.iterdir()}:
            _link(folder / name, f"{STATE}/{CURRENT}/{name}")  # leads nowhere until the swap
        fresh = state / f"{tree.name}.link"
        _link(fresh, tree.name)
    except BaseException:
        _remove(tree)
        raise
    fresh.replace(current)
    for entry in folder.iterdir():
        if _ours(entry) and entry.name not in names:
            entry.unlink()
    for old in state.iterdir():  # also what a killed run left
        if old.name not in {CURRENT, LOCK, tree.name}:
            _remove(old)
    return replaced


def _ours(entry: Path) -> bool:
    return entry.is_symlink() and os.readlink(entry) == f"{STATE}/{CURRENT}/{entry.name}"


def _link(link: Path, target: str) -> None:
    try:
        link.symlink_to(target)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        raise OperatorError(
            f"{link.parent} takes no symbolic links: name a folder on a local filesystem"
        ) from None


def _remove(entry: Path) -> None:
    """What cannot be removed now is left to the next run: nothing looks at it."""
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)


COMMANDS = (install_plugin,)
