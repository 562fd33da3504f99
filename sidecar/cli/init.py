"""init: make a registry. Everything else takes a root without one for a volume that is not mounted."""

from __future__ import annotations

from pathlib import Path

import click

from lora_fs.sidecar.cli import parameters
from lora_fs.sidecar.cli.context import Context
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.volume.mounts import mount_of


@click.command()
@click.option("--root", type=parameters.Place(), metavar="DIR", help="As before the command")
@parameters.output
@click.pass_obj
def init(context: Context, root: Path | None, output: str) -> None:
    """Make the registry's folder a registry; exit 0 and change nothing if it is one.

    Until then every other command exits 3, and sidecars are not ready: an empty folder may be a volume
    that is not mounted.

    \b
    Examples:
      lora-fs init
      lora-fs init --root /adapters
    """
    folder = (root or context.root()).resolve()
    (found, made), (mount, kind) = marker.create(folder), mount_of(folder)
    if output == "json":
        told = {"root": str(folder), "made": made, "registry_uuid": found.registry_uuid, "tier": found.tier}
        context.emit({**told, "mount": mount, "filesystem": kind})
        return
    what = "made a registry in" if made else "nothing to do: there is a registry in"
    context.say(f"{what} {folder} (on {mount}, {kind}; tier {found.tier})")
    if found.tier == "lww":
        context.say(
            "warning: no hard links here: of two writers at once both are acknowledged, the last wins"
        )


COMMANDS = (init,)
