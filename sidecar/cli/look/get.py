"""get: list or show adapters in the words that other tools' users type; or write the input of ``apply``."""

from __future__ import annotations

import click

from lora_fs.sidecar.cli.look.listing import list_adapters, read, rows_of, selector_option
from lora_fs.sidecar.cli.look.show import show
from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, as_yaml, put
from lora_fs.sidecar.errors import NotFound
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.registry.lifecycle.selectors import Selection


@command()
@parameters.name_or_pattern
@parameters.revision_option()
@selector_option
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def get(
    context: Context,
    name: str | None,
    revision: str | None,
    selector: str | None,
    all_namespaces: bool,
    output: Format,
) -> None:
    """List the registered adapters, or show NAME.

    With -o yaml these are documents that apply reads.

    \b
    Examples:
      lora-fs get
      lora-fs get support -o yaml
    """
    is_list, run = name is None or bool(set(name) & set("*?[")), click.get_current_context()
    if not is_list and (selector is not None or all_namespaces):
        raise click.UsageError("--selector and --all-namespaces are for a list: leave NAME out")
    if output is Format.YAML:
        selection = Selection.parse(name, selector)
        only = None if is_list else name
        _write_documents(context, selection, only, revision, all_namespaces=all_namespaces)
    elif is_list:
        run.invoke(
            list_adapters,
            name=name,
            revision=revision,
            selector=selector,
            all_namespaces=all_namespaces,
            output=output,
        )
    else:
        run.invoke(show, name=name, revision=revision, output=output)


def _write_documents(
    context: Context, selection: Selection, only: str | None, revision: str | None, *, all_namespaces: bool
) -> None:
    """Print a document for each name, of the revision that it serves; else of the last one."""
    from lora_fs.sidecar.cli.declared.documents import document_of

    scopes = context.scopes(all_namespaces=all_namespaces)
    with read(context, scopes, only) as desired:
        chosen: dict[tuple[Scope, str], Record] = {}
        for record, _ in sorted(rows_of(desired), key=lambda row: row[1]):
            if revision in (None, record.revision) and selection.covers(record.name, record):
                chosen[record.key.scope, record.name] = record
        if selection.pattern is not None and not chosen and not desired.problems:
            what = selection.pattern if revision is None else f"{selection.pattern}@{revision}"
            raise NotFound(f"{what} is not registered in {', '.join(map(str, scopes))}")
        documents = [
            document_of(chosen[name], desired.pointers.get(name)).model_dump(
                mode="json", exclude_defaults=True
            )
            for name in sorted(chosen)
        ]
    if documents:
        put(as_yaml(documents))


COMMANDS = (get,)
