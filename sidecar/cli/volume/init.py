"""init: make a registry. Every other command takes a root without one for an unmounted volume."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import RegistryLost, RegistryMissing
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.registry.volume.mounts import mount_of


@command()
@parameters.dry_run
@parameters.output
@click.pass_obj
def init(context: Context, dry_run: bool, output: Format) -> None:
    """Make the registry's folder a registry; exit 0 and change nothing if it is one.

    Until then every other command exits 3, and sidecars are not ready: an empty folder may be an
    unmounted volume.

    \b
    Examples:
      lora-fs init
      lora-fs init --root /adapters
    """
    folder = context.root().resolve()
    if dry_run:
        _rehearse(context, folder, output)
        return
    found, made = marker.create(folder)
    if made:
        context.noted.update(registry_uuid=found.registry_uuid)
    mount, kind = mount_of(folder)
    told = {"root": str(folder), "made": made, "registry_uuid": found.registry_uuid, "tier": found.tier}
    if context.printed({**told, "mount": mount, "filesystem": kind}, output, [str(folder)]):
        return
    what = "made a registry in" if made else "nothing to do: there is a registry in"
    context.say(f"{what} {folder} (on {mount}, {kind}; tier {found.tier})")
    if found.tier == "lww":
        context.say(
            "warning: no hard links here: of two writers at once both are acknowledged, the last wins"
        )


def _rehearse(context: Context, folder: Path, output: Format) -> None:
    nearest = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    try:
        found = marker.read_marker(folder)
    except RegistryMissing as missing:
        found = None
        _check_place(folder, nearest)
        if marker.was_written_to(folder):
            raise RegistryLost(str(missing)) from missing
    mount, kind = mount_of(nearest)
    told = {
        "root": str(folder),
        "made": found is None,
        "registry_uuid": found.registry_uuid if found else None,
        "tier": found.tier if found else None,
    }
    if not context.printed({**told, "mount": mount, "filesystem": kind}, output, [str(folder)]):
        what = "there is a registry in" if found else "would make a registry in"
        context.say(f"{what} {folder} (on {mount}, {kind})")


def _check_place(folder: Path, nearest: Path) -> None:
    """Refuse what ``init`` would refuse, and write nothing.

    Args:
        nearest: of ``folder`` and the folders above it the deepest that exists.
    Raises:
        VolumeUnavailable: something else is in the way, or the volume does not take a folder there.
    """
    with atomic.explained(f"cannot create {folder}"):
        if not nearest.is_dir():
            raise OSError(errno.EEXIST if nearest == folder else errno.ENOTDIR, "")
        if not os.access(nearest, os.W_OK | os.X_OK):
            read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
            raise OSError(errno.EROFS if read_only else errno.EACCES, "")


COMMANDS = (init,)
