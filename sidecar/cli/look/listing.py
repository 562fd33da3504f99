"""list and show: what is registered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import Format, complain, shown_bytes, shown_time
from lora_fs.sidecar.errors import NotFound, OperatorError
from lora_fs.sidecar.model import Record, Scope
from lora_fs.sidecar.registry.lifecycle.selectors import Selection
from lora_fs.sidecar.registry.view.snapshot import Desired


@contextmanager
def _read(context: Context, scopes: Sequence[Scope]) -> Iterator[Desired]:
    """What is registered. Where something cannot be read it is shown without, and that is a failure."""
    desired = context.backend.desired(scopes)
    for problem in desired.problems.values():
        complain(f"unreadable, left out or shown as it was before: {problem}")
    yield desired
    if desired.problems:
        raise OperatorError("not everything could be read: something that is registered may be missing here")


def _rows(desired: Desired, name: str | None = None) -> list[tuple[Record, bool]]:
    """Every present record, with whether the plain name serves it."""
    records = (record for record in desired.records.values() if record.present)
    chosen = sorted((r for r in records if name in (None, r.name)), key=_order)
    return [(record, _serves(desired, record)) for record in chosen]


def _serves(desired: Desired, record: Record) -> bool:
    pointer = desired.pointers.get((record.key.scope, record.name))
    return pointer is not None and pointer.revision == record.revision


selector_option = click.option(
    "-l", "--selector", metavar="K=V,…", help="By labels: k=v, k!=v, k or !k, commas between"
)


@command("list")
@parameters.pattern
@parameters.revision_option()
@selector_option
@parameters.all_namespaces
@parameters.no_headers
@parameters.output
@click.pass_obj
def list_adapters(
    context: Context,
    name: str | None,
    revision: str | None,
    selector: str | None,
    all_namespaces: bool,
    output: Format,
) -> None:
    """List what is registered; * marks the revision that the plain name serves.

    PATTERN is of the name, as in a shell: quote it.

    \b
    Examples:
      lora-fs list -o wide
      lora-fs list 'support-*' -l team=sql
      lora-fs list 'support-*@v2'
      lora-fs list -A -o name
    """
    selection = Selection.parse(name, selector)
    scopes = context.scopes(all_namespaces=all_namespaces)
    with _read(context, scopes) as desired:
        _list(context, desired, scopes, selection, revision, output, all_namespaces=all_namespaces)


def _list(
    context: Context,
    desired: Desired,
    scopes: Sequence[Scope],
    selection: Selection,
    revision: str | None,
    output: Format,
    *,
    all_namespaces: bool,
) -> None:
    everything = _rows(desired)
    rows = [
        (record, active)
        for record, active in everything
        if selection.covers(record.name, record) and revision in (None, record.revision)
    ]
    if not output.for_people:
        told = [{**record.model_dump(mode="json"), "active": active} for record, active in rows]
        names = {f"{r.namespace}/{r.name}" if all_namespaces else r.name for r, _ in rows}
        context.printed(told, output, sorted(names))
        return
    shares = {
        (scope, name, pointer.canary.revision): f"{pointer.canary.percent} %"
        for (scope, name), pointer in desired.pointers.items()
        if pointer.canary is not None
    }
    columns = [*(["NAMESPACE"] if all_namespaces else []), "NAME", "REVISION", "ACTIVE", "RANK", "SIZE"]
    columns += ["DIGEST", "ORIGIN", "POLICY", "UPDATED"] if output is Format.WIDE else []
    cells = []
    for record, active in rows:
        trial = shares.get((record.key.scope, record.name, record.revision), "")
        row = [record.namespace] if all_namespaces else []
        row += [record.name, record.revision, "*" if active else trial]
        row += [str(record.spec.lora.rank), shown_bytes(record.spec.size_bytes)]
        if output is Format.WIDE:
            policy = record.spec.policy.kind.value if record.spec.policy else "default"
            row += [record.spec.digest[7:19], record.origin, policy, shown_time(record.updated_at)]
        cells.append(row)
    context.table(columns, cells)
    if not everything and not desired.problems:
        context.nothing_in(scopes)
    elif not rows:
        where = ", ".join(map(str, scopes))
        complain(f"no adapter matches ({len(everything)} revisions are registered in {where})")


@command()
@parameters.name
@parameters.revision_option()
@parameters.output
@click.pass_obj
def show(context: Context, name: str, revision: str | None, output: Format) -> None:
    """Show NAME: what it serves, and each of its revisions.

    \b
    Examples:
      lora-fs show support
      lora-fs show support@v1 -o json
    """
    with _read(context, (context.scope(),)) as desired:
        _show(context, desired, name, revision, output)


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
        _write_documents(context, selection, revision, all_namespaces=all_namespaces)
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
    context: Context, selection: Selection, revision: str | None, *, all_namespaces: bool
) -> None:
    """Print a document for each name, of the revision that it serves; else of the last one."""
    import yaml  # needed for this format alone

    from lora_fs.sidecar.cli.declared.documents import document_of

    scopes = context.scopes(all_namespaces=all_namespaces)
    with _read(context, scopes) as desired:
        chosen: dict[tuple[Scope, str], Record] = {}
        for record, _ in sorted(_rows(desired), key=lambda row: row[1]):
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
        click.echo(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True), nl=False)


def _show(context: Context, desired: Desired, name: str, revision: str | None, output: Format) -> None:
    scope = context.scope()
    rows = [row for row in _rows(desired, name) if revision in (None, row[0].revision)]
    if not rows and not desired.problems:
        what = name if revision is None else f"{name}@{revision}"
        raise NotFound(f"{what} is not registered in {scope}: `lora-fs list` shows what is")
    if not rows:
        return  # it is not known that it is not there
    pointer = desired.pointers.get((scope, name))
    told = {
        "pointer": pointer.model_dump(mode="json") if pointer else None,
        "revisions": [record.model_dump(mode="json") for record, _ in rows],
    }
    if context.printed(told, output, [f"{name}@{record.revision}" for record, _ in rows]):
        return
    serves = pointer.revision if pointer is not None and pointer.revision else "nothing"
    before = pointer.previous_revision if pointer is not None else None
    trial = pointer.canary if pointer is not None else None
    canary = f"; {trial.revision} answers {trial.percent} % of the requests" if trial is not None else ""
    context.say(f"{name} in {scope} serves {serves}" + (f", before that {before}" if before else "") + canary)
    for record, _ in rows:
        spec = record.spec
        policy = spec.policy
        lines = {
            "base model": spec.base_model,
            "files": f"{spec.path} ({shown_bytes(record.spec.size_bytes)})",
            "source": spec.source.uri,
            "digest": spec.digest,
            "lora": f"rank {spec.lora.rank}, alpha {spec.lora.alpha:g}, {spec.lora.dtype}, "
            f"{', '.join(spec.lora.target_modules)}",
            "policy": f"{policy.kind.value}, TTL {policy.ttl_s} s, priority {policy.priority}"
            if policy
            else "as each sidecar is set",
            "labels": ", ".join(f"{key}={value}" for key, value in spec.labels.items()) or "none",
            **({"signed by": spec.signer} if spec.signer is not None else {}),
            "written": f"{shown_time(record.updated_at)} by {record.writer}, generation {record.generation}",
        }
        context.say("")
        context.say(record.revision)
        for title, text in lines.items():
            context.say(f"  {title:<11}{text}")


def _order(record: Record) -> tuple[str, str, list[tuple[int, str]]]:
    """By namespace and name, and v2 before v10."""
    parts = re.split(r"([0-9]+)", record.revision)
    return record.namespace, record.name, [(int(part), "") if part.isdigit() else (0, part) for part in parts]


COMMANDS = (list_adapters, show, get)
