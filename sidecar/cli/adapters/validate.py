"""validate: whether lora-fs can serve a folder."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, counted, shown_bytes
from lora_fs.sidecar.cli.progress import reading
from lora_fs.sidecar.errors import InvalidAdapter
from lora_fs.sidecar.reconcile.limits import with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.validate import Report, validate


@command("validate")
@parameters.path
@parameters.allow
@parameters.output
@click.pass_obj
def validate_folder(context: Context, path: str, allow: tuple[str, ...], output: Format) -> None:
    """Check the adapter in PATH as register would; exit 5 if no engine can serve it.

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
    shape = report.shape
    told = {
        "ok": report.ok,
        "findings": [f.model_dump(mode="json") for f in report.findings],
        "size_bytes": report.size_bytes if report.served_files else None,
        "rank": None if shape is None else shape.rank,
        "target_modules": None if shape is None else list(shape.target_modules),
    }
    if context.printed(told, output, [f.code for f in report.findings]):
        if not report.ok:
            raise click.exceptions.Exit(5)
        return
    for finding in report.warnings:
        context.say(f"warning: {finding.render()}")
    if not report.ok:
        raise InvalidAdapter(str(folder), report.errors)
    context.say(f"{path} can be served: {_measures(report, output)}")


def _measures(report: Report, output: Format) -> str:
    """The size of the files that an engine reads, the rank and the modules; ``wide`` names them."""
    parts = [shown_bytes(report.size_bytes)]
    if (shape := report.shape) is not None:
        parts += [f"rank {shape.rank}", counted(len(shape.target_modules), "target module")]
        if output is Format.WIDE:
            parts[-1] += f" ({', '.join(shape.target_modules)})"
            parts += [f"alpha {shape.alpha:g}", shape.dtype]
    return ", ".join(parts)


COMMANDS = (validate_folder,)
