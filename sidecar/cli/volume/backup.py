"""export, import and fsck: a registry out of the volume, into it, and whether it is sound."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Duration, Place, labels, stdin
from lora_fs.sidecar.cli.output import Format, complain, counted, shown_bytes, unread
from lora_fs.sidecar.cli.volume.incoming import How, from_gie, from_nim
from lora_fs.sidecar.errors import Conflict, NotFound, OperatorError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.backup import archive, export, restore
from lora_fs.sidecar.registry.maintenance import fsck, survey
from lora_fs.sidecar.registry.maintenance.garbage import ahead_s
from lora_fs.sidecar.registry.maintenance.repair import mend
from lora_fs.sidecar.registry.volume.atomic import explained
from lora_fs.sidecar.settings import writer_id

KINDS = ("archive", "gie", "nim")
# What people read; scripts get ``dry_run`` and the outcome.
DID = {"restore": "restored"}
WOULD = {
    "registered": "would register",
    "restored": "would restore",
    "restore": "would restore",
    "unregistered": "would unregister",
}
NAMED = 5  # of the names that a summary tells of


@command("export")
@click.argument("file", type=Place())
@click.option("--artifacts/--no-artifacts", default=True, help="With the adapters' files [default: yes]")
@click.option("--scope-only", is_flag=True, help="This namespace and model alone [default: all there are]")
@click.option("--force", is_flag=True, help="Replace an existing FILE")
@parameters.output
@click.pass_obj
def export_registry(
    context: Context, file: Path, artifacts: bool, scope_only: bool, force: bool, output: Format
) -> None:
    """Write the registry to FILE as one tar; - is stdout. Writers and sidecars go on meanwhile.

    \b
    Examples:
      lora-fs export adapters.tar
      lora-fs export --no-artifacts records.tar
    """
    streams = str(file) == "-"
    if streams and output is not Format.TEXT:
        raise click.UsageError(f"with - stdout is the export: leave -o {output.value} out")
    if streams and sys.__stdout__ is None:  # sys.stdout is /dev/null by now
        raise click.UsageError("with - the export is written to stdout, and that is closed")
    if streams and sys.stdout.isatty():
        raise click.UsageError("with - the export is written to stdout, and that is a terminal: redirect it")
    if not streams and file.exists() and not force:
        raise Conflict(f"{file} exists: name another file, or repeat with --force")
    registry = context.registry()
    scopes = [context.scope()] if scope_only else registry.scopes()
    if streams:
        try:
            done = export.write(registry, scopes, sys.stdout.buffer, artifacts=artifacts)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            unread()
            raise OperatorError("the reader of the export left before its end: discard what it has") from None
    else:
        done = export.to_file(registry, scopes, file, artifacts=artifacts)
    if scope_only and not done.records:
        context.nothing_in(scopes)
    for problem in done.left_out:
        complain(f"not exported whole: {problem}")
    counts = {"records": done.records, "pointers": done.pointers, "adapters": done.adapters}
    told = {"file": str(file), **counts, "size_bytes": done.size_bytes, "left_out": done.left_out}
    if not streams and not context.printed(told, output, [str(file)]):
        of = f"the files of {counted(done.adapters, 'adapter')} ({shown_bytes(done.size_bytes)})"
        named = f"{counted(done.records, 'record')}, {counted(done.pointers, 'name')}"
        context.say(f"exported {named}, {of if artifacts else 'no files'} to {file}")
    if done.left_out:
        left_out = counted(len(done.left_out), "thing")
        raise OperatorError(f"the export lacks {left_out}; `lora-fs fsck` says more")


@command("import")
@click.argument("kind", type=click.Choice(KINDS))
@click.argument("source", type=Place())
@click.option("--as-new", is_flag=True, help="archive: give the restored registry an id of its own")
@click.option(
    "--folder",
    multiple=True,
    callback=labels,
    metavar="SOURCE=DIR",
    help="gie: where a source that is no local path was downloaded to; repeatable",
)
@click.option("--link", is_flag=True, help="gie, nim: refer to the folders where they are, do not copy them")
@parameters.allow
@parameters.force
@parameters.dry_run
@parameters.create
@parameters.output
@click.pass_obj
def import_registry(
    context: Context,
    kind: str,
    source: Path,
    as_new: bool,
    folder: dict[str, str],
    link: bool,
    allow: tuple[str, ...],
    force: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Restore an archive that export wrote, or register another system's adapters.

    \b
    Examples:
      lora-fs import archive adapters.tar --dry-run
      lora-fs import archive adapters.tar
      lora-fs import gie configmap.yaml --folder yard1/sql-lora=./sql-lora
      lora-fs import nim ./loras
    """
    given = {
        "--as-new": as_new,
        "--folder": folder,
        "--link": link,
        "--allow": allow,
        "--force": force,
    }
    takes = {"archive": {"--as-new"}, "gie": {"--folder", "--link", "--allow", "--force"}}
    for option in given.keys() - takes.get(kind, {"--link", "--allow", "--force"}):
        if given[option]:
            raise click.UsageError(f"{option} is not for `import {kind}`")
    context.root()  # without a volume nothing is read
    if kind == "archive":
        with _archive(source) as file:
            _restore(context, file, as_new, dry_run, output)
        return
    how = How(link, allow, force, dry_run)
    rows = from_gie(context, source, folder, how) if kind == "gie" else from_nim(context, source, how)
    _tell(context, rows, dry_run, output)
    bad = sum(row["outcome"] == "failed" for row in rows)
    if bad:
        raise OperatorError(f"{bad} of {len(rows)} were not imported")


@contextmanager
def _archive(source: Path) -> Iterator[Path]:
    """The archive as a file, since import reads it more than once. Copies stdin to a temporary file."""
    if str(source) != "-":
        if not source.exists():
            raise NotFound(f"{source}: no such file")
        yield source
        return
    received = stdin("the archive")
    with TemporaryDirectory(prefix="lora-fs-import-") as folder:
        file = Path(folder) / "stdin"
        with explained(f"cannot keep stdin in {folder}"), file.open("wb") as kept:
            shutil.copyfileobj(received, kept)
        yield file


def _restore(context: Context, file: Path, as_new: bool, dry_run: bool, output: Format) -> None:
    contents, root = archive.read(file), context.root()
    if dry_run:
        lost = restore.check(root, contents)
    else:
        lost = restore.restore(root, file, contents, as_new=as_new)
        context.noted.update(restored=len(contents.records))
    rows = [{"what": str(key), "outcome": "restore", "why": ""} for key in contents.records]
    _tell(context, rows, dry_run, output)
    for problem in lost:
        complain(problem)
    if lost:
        raise OperatorError(f"without files: {counted(len(lost), 'adapter')}")


def _tell(context: Context, rows: list[dict[str, Any]], dry_run: bool, output: Format) -> None:
    if context.printed({"dry_run": dry_run, "items": rows}, output, [row["what"] for row in rows]):
        return
    words = WOULD if dry_run else DID
    done = [words.get(row["outcome"], row["outcome"]) for row in rows]
    width = max(12, *map(len, done)) if done else 0
    for outcome, row in zip(done, rows, strict=True):
        why = " ".join(row["why"].split())  # findings are a line each: say would print "\n"
        context.say(f"{outcome:<{width}} {row['what']}" + (f": {why}" if why else ""))
    counts = Counter(done)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "nothing to do"
    context.say(f"{told}{' (dry run: nothing was changed)' if dry_run else ''}")


@command("fsck")
@click.option("--repair", is_flag=True, help="Mend what can be mended without losing or guessing anything")
@click.option("--dry-run", is_flag=True, help="With --repair: name what it would mend; change nothing")
@click.option("--quick", is_flag=True, help="Compare the sizes of files, do not read them")
@click.option(
    "--older-than",
    type=Duration(bare=False),
    default="24h",
    show_default=True,
    help="Pass over half copies and unregistered folders that are younger",
)
@parameters.output
@click.pass_obj
def check_registry(
    context: Context, repair: bool, dry_run: bool, quick: bool, older_than: float, output: Format
) -> None:
    """Look for what is wrong in the whole registry: damaged records, lost or changed files, leftovers.

    \b
    Examples:
      lora-fs fsck
      lora-fs fsck --repair
      lora-fs fsck --quick -o json
    """
    repair = repair and not dry_run
    with context.opened() as registry:
        state = survey.look(registry)
        if repair:  # by the volume's clock: a host whose clock is ahead would remove copies under way
            older_than += ahead_s(registry.layout)
        found = list(fsck.find(registry, state, older_than_s=older_than, hash_files=not quick))
        outcome: dict[fsck.Finding, str | None] = {}
        if repair:
            expectation = context.expectation()
            mended = 0
            for one, why_not in mend(registry, state, found, expectation, writer=writer_id()):
                outcome[one] = why_not
                if why_not is None:
                    mended += 1
                    context.noted.update(mended=mended)
    left = [one for one in found if one not in outcome or outcome[one] is not None]
    unnamed = fsck.without_pointer(registry, state)
    items = [
        {
            "kind": one.kind.value,
            "path": str(one.path),
            "text": one.text,
            "mend": one.mend or None,
            "mended": one not in left,
            "why_not": outcome.get(one),
        }
        for one in found
    ]
    told = {
        "ok": not left,
        "records": len(state.records),
        "findings": items,
        "without_pointer": [f"{scope}: {name}" for scope, name in unnamed],
    }
    if not context.printed(told, output, [str(one.path) for one in found]):
        for one in found:
            context.say(f"{one.kind.value}: {one.path}: {one.text}")
            if one not in left:
                context.say(f"  mended: {one.mend}")
            elif repair:
                context.say(f"  left: {outcome[one]}")
            elif one.mend:
                context.say(f"  --repair: {one.mend}")
        counts = f"{counted(len(state.records), 'record')}, {counted(len(found), 'finding')}"
        context.say(f"{counts}, {len(found) - len(left)} mended{_without_pointer(unnamed)}")
    if left:
        raise OperatorError(f"left to mend: {counted(len(left), 'finding')}")


def _without_pointer(names: list[tuple[Scope, str]]) -> str:
    """Behind the summary: ``; 2 names without a pointer: …``; no finding, for it may be meant."""
    if not names:
        return ""
    shown = ", ".join(f"{scope}: {name}" for scope, name in names[:NAMED]) + " …" * (len(names) > NAMED)
    return (
        f"; {counted(len(names), 'name')} without a pointer: {shown} "
        "(served by their revisions alone, as after `register --no-activate`; "
        "if that was not meant: `lora-fs promote NAME REVISION`)"
    )


COMMANDS = (export_registry, import_registry, check_registry)
