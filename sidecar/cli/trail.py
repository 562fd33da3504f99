"""The audit of what commands change: one line each, whatever came of it.

Commands that only read, and dry runs, leave no line. A server audits what it does itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import complain
from lora_fs.sidecar.errors import LoraFsError

# What each command changes the registry with; without such an option quota and fsck only read.
ACTS: dict[str, tuple[str, ...]] = {
    "init": (),
    "register": (),
    "apply": (),
    "unregister": (),
    "promote": (),
    "rollback": (),
    "evaluate": (),
    "canary": ("revision", "percent", "steps", "finish", "abort"),
    "pin": (),
    "unpin": (),
    "set": (),
    "quota": ("adapters", "size_bytes", "per_minute", "keep_revisions", "require_evaluation", "remove"),
    "gc": (),
    "import": (),
    "fsck": ("repair",),
}
_NOT_TOLD = frozenset({"output", "wait", "dry_run"})


def audited(command: click.Command) -> None:
    """Let a command that changes the registry tell the audit how it ended."""
    if command.name not in ACTS or command.callback is None:
        return
    act, switches, call = command.name, ACTS[command.name], command.callback

    @functools.wraps(call)
    def told(*arguments: Any, **options: Any) -> Any:
        context = click.get_current_context().find_object(Context)
        reads = switches and not any(_is_given(options.get(name)) for name in switches)
        if context is None or reads or options.get("dry_run") or context.server() is not None:
            return call(*arguments, **options)
        return _tell(context, act, options, lambda: call(*arguments, **options))

    command.callback = told


def _tell(context: Context, act: str, options: dict[str, Any], call: Callable[[], Any]) -> Any:
    from lora_fs.sidecar import audit  # not needed to say what commands there are
    from lora_fs.sidecar.settings import writer_id

    settings = context.settings
    what = {
        "namespace": settings.namespace,
        "model": settings.model,
        **{n: _plain(value) for n, value in options.items() if n not in _NOT_TOLD and _is_given(value)},
    }

    def tell(outcome: str, why: str = "") -> None:
        told = {**what, **context.noted, "written": ", ".join(context.written) or None}
        text = audit.line(act, who=writer_id(), source="cli", outcome=outcome, why=why, what=told)
        audit.write(settings.audit_file, text, complain)

    try:
        result = call()
    except click.UsageError:
        raise  # nothing was begun
    except BaseException as error:
        tell("done" if context.noted or context.written else "failed", _why(error))
        raise
    tell("done")
    return result


def _why(error: BaseException) -> str:
    """Say what ended a command, which may have written what it notes, and then waited or printed."""
    if isinstance(error, click.exceptions.Exit):
        return f"exit code {error.exit_code}"
    return str(error) if isinstance(error, LoraFsError | OSError) else f"ended by {type(error).__name__}"


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value not in ((), {})


def _plain(value: object) -> object:
    from lora_fs.sidecar.sources.uri import redacted

    if isinstance(value, bool | int | float):
        return value
    if isinstance(value, tuple):
        return ",".join(redacted(str(item)) for item in value)
    if isinstance(value, dict):
        return ",".join(f"{redacted(str(name))}={redacted(str(item))}" for name, item in value.items())
    return redacted(str(value))
