"""validate: whether lora-fs can serve a folder."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.cli.progress import reading
from lora_fs.sidecar.errors import InvalidAdapter
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.validate import validate


@command("validate")
@parameters.path
@parameters.allow
@parameters.output
@click.pass_obj
def validate_folder(context: Context, path: str, allow: tuple[str, ...], output: Format) -> None:
    """Check the adapter in PATH as register would; exit 5 if no replica can serve it.

    If you name the registry's folder and the base model, the live replicas' limits count, too.

    \b
    Examples:
      lora-fs validate ./support-lora
      lora-fs validate ./support-lora -o json
    """
    folder, expectation = resolve(path), context.expectation(allow=allow)
    if context.settings.root is not None and context.settings.model:
        expectation = with_fleet(expectation, Layout(context.root()), context.scope())
    with reading(folder) as advance:
        report = validate(folder, expectation, progress=advance)
    told = {"ok": report.ok, "findings": [f.model_dump(mode="json") for f in report.findings]}
    if context.printed(told, output, [f.code for f in report.findings]):
        if not report.ok:
            raise click.exceptions.Exit(5)
        return
    if not report.ok:
        raise InvalidAdapter(str(folder), report.findings)
    for finding in report.findings:
        context.say(f"warning: {finding.render()}")
    context.say(f"{path} can be served")


COMMANDS = (validate_folder,)
