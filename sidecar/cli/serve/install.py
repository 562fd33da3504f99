"""install-plugin: put the plugin into a folder, for a vLLM in another container or image.

Promise: with ``PYTHONPATH=DIR`` a vLLM finds one version as a whole, or none. The command writes a version
apart, and one rename shows it when complete, also where DIR is a mount point, which cannot be renamed itself:

    DIR/lora_fs            -> .lora-fs/current/lora_fs     one such link a top-level name; they stay
    DIR/.lora-fs/current   -> 0.1.0-3f9a01c7               an update swaps this one
    DIR/.lora-fs/0.1.0-3f9a01c7/                           the version, plain files

It touches nothing in DIR that is not its own. The next run removes what a killed one left. It follows no
symbolic link in the place of ``.lora-fs``, or in it. It removes only what has a version's name and holds what
this command puts into one.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import click
from filelock import FileLock, Timeout

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Place
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.cli.serve import bundle
from lora_fs.sidecar.errors import Conflict, InputError, OperatorError

STATE, CURRENT, LOCK = ".lora-fs", "current", "lock"
LINK = ".link"  # behind a version's name: the link that is to become ``current``
MARK = ".lora-fs-installed"  # the first thing in a version, and the last to go
METADATA = "lora_fs.dist-info"
VERSION = re.compile(r"[0-9][0-9A-Za-z.!+_-]*-[0-9a-z_]{8}")
WAIT_S = 30.0
WITHOUT_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS}


@command("install-plugin")
@click.argument("dir", type=Place())
@parameters.dry_run
@parameters.output
@click.pass_obj
def install_plugin(context: Context, dir: Path, dry_run: bool, output: Format) -> None:
    """Copy the vLLM plugin, with what it needs and vLLM lacks, to DIR for another container's vLLM.

    \b
    Examples:
      lora-fs install-plugin /plugin
      lora-fs install-plugin /plugin -o json
    """
    folder = dir.absolute()
    parts = bundle.collect()
    replaced = rehearse(folder, parts) if dry_run else install(folder, parts)
    ours, extras = parts[0], {part.name: part.version for part in parts[1:]}
    settings = context.settings
    needed = {
        "PYTHONPATH": (str(folder), ""),
        "VLLM_PLUGINS": ("lora_fs", ""),
        "LORA_FS_ROOT": (str(settings.root) if settings.root else None, "the registry's folder"),
        "LORA_FS_MODEL": (settings.model, "the base model, as vLLM's --model"),
        "LORA_FS_STAGE_DIR": (str(settings.stage_dir), "a local folder that vLLM may write to"),
    }
    told = {
        "path": str(folder),
        "dry_run": dry_run,
        "version": ours.version,
        "replaced": replaced,
        "extras": extras,
        "vllm": list(bundle.tested()),
        "environment": {name: value for name, (value, _) in needed.items()},
    }
    if context.printed(told, output, [str(folder)]):
        return
    along = ", ".join(f"{name} {version}" for name, version in extras.items())
    was = f", in place of {replaced}" if replaced else ""
    did = "would install" if dry_run else "installed"
    context.say(f"{did} lora-fs {ours.version} in {folder}{was}; with it {along}")
    context.say(f"tested on vLLM {', '.join(bundle.tested())}; vLLM's environment needs:")
    for name, (value, note) in needed.items():
        context.say(f"  {name}={value or '...'}" + (f"  # {note}" if note else ""))


def rehearse(folder: Path, parts: tuple[bundle.Part, ...]) -> str | None:
    """Refuse what ``install`` would refuse, and write nothing; returns the version that is there."""
    _check_folder(folder)
    _check_names(folder, parts)
    if not os.path.lexists(folder / STATE):
        return None
    with _state(folder) as state:
        return _current(folder, state)


def install(folder: Path, parts: tuple[bundle.Part, ...]) -> str | None:
    """Put the parts into ``folder`` in one step; returns the version that was there before."""
    _check_folder(folder)
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # the engine may run as somebody else
    with _state(folder) as state:
        try:
            with FileLock(folder / STATE / LOCK, timeout=WAIT_S):
                return _install(folder, state, parts)
        except Timeout:
            raise OperatorError(
                f"another install-plugin has been at work in {folder} for {WAIT_S:.0f} s"
            ) from None


def _check_folder(folder: Path) -> None:
    if os.pathsep in str(folder):
        raise InputError(f"{folder}: PYTHONPATH cannot name a path with {os.pathsep!r} in it, choose another")
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(f"{folder} is there and is no folder: name one, or what is to become one")


def _check_names(folder: Path, parts: tuple[bundle.Part, ...]) -> set[str]:
    """The names that the parts take in ``folder``; raises Conflict for one that is somebody else's."""
    names = {path.partition("/")[0] for part in parts for path in part.files}
    for name in sorted(names):
        if os.path.lexists(folder / name) and not _ours(folder / name):
            raise Conflict(
                f"{folder / name} is there and is not lora-fs's: name a folder of the plugin's own"
            )
    return names


@contextmanager
def _state(folder: Path) -> Iterator[int]:
    """``.lora-fs`` itself, made if absent. The handle never reaches what takes its name meanwhile."""
    place, made = folder / STATE, False
    with suppress(FileExistsError):
        os.mkdir(place)
        made = True
    try:
        state = _open_folder(place)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise _foreign(place, "no folder, or a symbolic link") from None
    try:
        if made:
            os.fchmod(state, 0o755)
        kind = _kind(LOCK, state)
        if kind not in (None, stat.S_IFREG):
            raise _foreign(place / LOCK, "no file")
        yield state
    finally:
        os.close(state)


def _foreign(place: Path, what: str) -> Conflict:
    return Conflict(
        f"{place} is there and is {what}, so it is not lora-fs's: remove it, "
        "or name a folder of the plugin's own"
    )


def _install(folder: Path, state: int, parts: tuple[bundle.Part, ...]) -> str | None:
    names = _check_names(folder, parts)
    replaced = _current(folder, state)
    tree = f"{parts[0].version}-{secrets.token_hex(4)}"
    os.mkdir(tree, 0o700, dir_fd=state)
    try:
        with _opened(tree, state) as inner:
            _mark(inner)
            bundle.write(parts, folder / STATE / tree)
            if not _is_at(folder / STATE / tree, inner):
                raise Conflict(f"{folder / STATE} became another folder meanwhile: run install-plugin again")
        for name in names - {entry.name for entry in folder.iterdir()}:
            _link(f"{STATE}/{CURRENT}/{name}", folder / name)  # leads nowhere until the swap
        _link(tree, folder / STATE / f"{tree}{LINK}", state)
    except BaseException:
        _remove(tree, state)
        raise
    os.replace(f"{tree}{LINK}", CURRENT, src_dir_fd=state, dst_dir_fd=state)
    for entry in folder.iterdir():
        if _ours(entry) and entry.name not in names:
            entry.unlink()
    for old in os.listdir(state):  # also what a killed run left
        if old != tree:
            _remove(old, state)
    return replaced


def _current(folder: Path, state: int) -> str | None:
    """The version that is there; None if none is."""
    kind = _kind(CURRENT, state)
    if kind is None:
        return None
    target = os.readlink(CURRENT, dir_fd=state) if kind == stat.S_IFLNK else ""
    if VERSION.fullmatch(target) is None:
        raise _foreign(folder / STATE / CURRENT, "no link to a version beside it")
    return target.rpartition("-")[0]


def _ours(entry: Path) -> bool:
    return entry.is_symlink() and os.readlink(entry) == f"{STATE}/{CURRENT}/{entry.name}"


def _link(target: str, link: Path, folder: int | None = None) -> None:
    """Make ``link``; in ``folder``, if given, whatever has its path by now."""
    try:
        os.symlink(target, link if folder is None else link.name, dir_fd=folder)
    except OSError as error:
        if error.errno not in WITHOUT_LINKS:
            raise
        raise OperatorError(
            f"{link.parent} takes no symbolic links: name a folder on a local filesystem"
        ) from None


def _remove(name: str, state: int) -> None:
    """Remove a version, or the link to one, if this command made it.

    What this cannot remove now is left to the next run: nothing looks at it.
    """
    version = name.removesuffix(LINK)
    if VERSION.fullmatch(version) is None:
        return
    with suppress(OSError):
        if name != version:
            if os.readlink(name, dir_fd=state) == version:
                os.unlink(name, dir_fd=state)
            return
        with _opened(name, state) as inner:
            entries = os.listdir(inner)
            if entries:
                mark = _kind(MARK, inner)
                if mark is None and _kind(METADATA, inner) == stat.S_IFDIR:
                    _mark(inner)  # so that the next run knows the rest, should this one be killed
                elif mark != stat.S_IFREG:
                    return
                for entry in entries:
                    _discard(entry, inner)
                os.unlink(MARK, dir_fd=inner)
        os.rmdir(name, dir_fd=state)


def _discard(name: str, folder: int) -> None:
    if _kind(name, folder) == stat.S_IFDIR:
        shutil.rmtree(name, dir_fd=folder)
    elif name != MARK:
        os.unlink(name, dir_fd=folder)


def _mark(folder: int) -> None:
    handle = os.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fchmod(handle, 0o644)
    finally:
        os.close(handle)


def _kind(name: str, folder: int) -> int | None:
    """The file type of a name, without following a link; None if it is absent."""
    try:
        return stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return None


def _is_at(path: Path, folder: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.lstat(path), os.fstat(folder))
    return False


def _open_folder(path: str | Path, folder: int | None = None) -> int:
    """Open a folder for what is in it; a symbolic link is none."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)


@contextmanager
def _opened(name: str, folder: int) -> Iterator[int]:
    inner = _open_folder(name, folder)
    try:
        yield inner
    finally:
        os.close(inner)


COMMANDS = (install_plugin,)
