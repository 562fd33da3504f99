"""The command group, its shared options, and the one place where errors become exit codes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import click
from rich.console import Console

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli import parameters, trail
from lora_fs.sidecar.cli.context import Context, complain, exit_code, read_settings, unread
from lora_fs.sidecar.errors import LoraFsError

FAILED, USAGE, INTERRUPTED = 1, 2, 130
ENVIRONMENT = (
    "Which registry: --root, --namespace and --model before the command, "
    "or LORA_FS_ROOT, LORA_FS_NAMESPACE and LORA_FS_MODEL."
)

# In the order of their use: the module that has a command, and the first sentence of its help. A module
# is imported when its command is named: most of them need libraries that the others do not.
COMMANDS: dict[str, tuple[str, str]] = {
    "init": ("init", "Make the registry's folder a registry; exit 0 and change nothing if it is one"),
    "register": (
        "register",
        "Register the adapter in SOURCE under NAME: a folder, or hf://, s3://, gs://, https:// or pvc://",
    ),
    "validate": ("validation", "Check the adapter in PATH as register would; exit 5 if it cannot be served"),
    "unregister": ("names", "Take NAME away, everywhere"),
    "promote": ("names", "Let NAME serve REVISION"),
    "rollback": ("names", "Let NAME serve the revision it served before"),
    "canary": (
        "canary",
        "Let REVISION answer a share of the requests for NAME; or raise, finish or abort that",
    ),
    "pin": ("amend", "Keep NAME in every engine, whatever needs its place"),
    "unpin": ("amend", "Give NAME the policy back that it had before it was pinned"),
    "set": (
        "amend",
        "Change what is said of NAME: when it is loaded, its labels, how many revisions are kept",
    ),
    "list": ("listing", "List what is registered; * marks the revision that the plain name serves"),
    "show": ("listing", "Show NAME: what it serves, and each of its revisions"),
    "status": ("status", "Show every adapter on every replica; a line marked ! is a replica's trouble"),
    "top": ("top", "Watch replicas, what is loaded, rates, and the adapters that are in trouble or busy"),
    "events": ("events", "Show what happened lately on every replica, to NAME or to all"),
    "wait": (
        "until",
        "Wait until every replica has NAME ready, or gone, or in a condition; exit 6 if one does not",
    ),
    "quota": ("quota", "Show what the namespace may register and what it has; with options, set it"),
    "sidecar": ("serve", "Serve one replica: reconcile its vLLM to the registry, answer and proxy the API"),
    "demo": ("serve", "Run two real vLLM replicas on one folder and walk through what lora-fs does"),
    "doctor": (
        "doctor",
        "Check the volume: its filesystem, its promises, every record of the scope, every replica",
    ),
    "gc": (
        "maintain",
        "Remove the files of adapters unregistered long ago, what dead writers left, and old history",
    ),
    "export": ("backup", "Write the registry to FILE as one tar; - is stdout"),
    "import": (
        "backup",
        "Restore an archive that export wrote, or register another system's adapters",
    ),
    "fsck": (
        "backup",
        "Look for what is wrong in the whole registry: damaged records, lost or changed files, leftovers",
    ),
    "install-plugin": (
        "install",
        "Copy the vLLM plugin, with what it needs and vLLM lacks, to DIR for another container's vLLM",
    ),
}


class Lazy(MutableMapping[str, click.Command]):
    """Commands by name, each imported when it is asked for."""

    def __init__(self) -> None:
        self._imported: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._imported and name in COMMANDS:
            for command in import_module(f"lora_fs.sidecar.cli.{COMMANDS[name][0]}").COMMANDS:
                trail.follow(command)
                command.epilog = ENVIRONMENT if command.name != "demo" else None
                self[command.name] = command
        return self._imported[name]

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._imported[name] = command

    def __delitem__(self, name: str) -> None:
        del self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class Commands(click.Group):
    """The commands, listed in the order of their use, each with the whole of its first sentence."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _while_read():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _while_read():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, f"{told}.") for name, (_, told) in COMMANDS.items()])


@contextmanager
def _while_read() -> Iterator[None]:
    """A reader of the output that goes away, as ``head`` does, ends the command without a word."""
    try:
        yield
    except BrokenPipeError:
        unread()
        raise click.exceptions.Exit(0) from None


@click.group(
    cls=Commands,
    commands=Lazy(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--root",
    type=parameters.Place(),
    metavar="DIR",
    help="The registry's folder [LORA_FS_ROOT, DYNAMO_LORA_PATH]",
)
@click.option(
    "--namespace", multiple=True, metavar="NAME", help="Tenant [LORA_FS_NAMESPACE; default: default]"
)
@click.option("--model", metavar="ID", help="Base model: hub id, path or served name [LORA_FS_MODEL]")
@click.option(
    "--base-config",
    type=parameters.Place(),
    metavar="PATH",
    help="The base model's config.json, or its folder [LORA_FS_BASE_CONFIG]",
)
@click.version_option(__version__, prog_name="lora-fs")
@click.pass_context
def cli(context: click.Context, /, namespace: tuple[str, ...], **options: Any) -> None:
    """Register LoRA adapters on a shared volume; every vLLM replica serves them.

    \b
    Examples:
      lora-fs init --root /adapters
      lora-fs --root /adapters --model Qwen/Qwen2.5-7B register support ./support-lora
      lora-fs status
      lora-fs unregister support

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 invalid adapter,
    6 timed out waiting, 7 over quota, 130 interrupted.

    \b
    Shell completion: eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)", or zsh_source; for fish:
      _LORA_FS_COMPLETE=fish_source lora-fs | source
    """
    if namespace:
        options |= {"namespace": namespace[0], "namespaces": namespace}
    context.obj = Context(read_settings(**options), Console())
    if options["base_config"] is not None:  # also for a command that has no use for it: it was misspelt
        context.obj.expectation()


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; returns its documented exit code. Every known error is one sentence."""
    try:
        code = cli.main(arguments, prog_name="lora-fs", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        told = _misplaced(error) if isinstance(error, click.NoSuchOption) else error
        with suppress(OSError):  # nobody reads why
            told.show()
        return told.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except LoraFsError as error:
        return _fail(str(error), exit_code(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}", FAILED)


def _misplaced(error: click.NoSuchOption) -> click.UsageError:
    """An option of the group that stands behind the command is almost right: say where it belongs."""
    if error.option_name not in {option for parameter in cli.params for option in parameter.opts}:
        return error
    where = f"write {error.option_name} before the command: lora-fs {error.option_name} … COMMAND"
    return click.UsageError(where, error.ctx)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # nobody reads why
        complain(message)
    return code


def main() -> None:
    """The script's entry.

    A stream that was closed is one that nobody reads; a character that its encoding lacks is escaped; a
    terminal's size of 0 is none.
    """
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(text := getattr(sys, stream), io.TextIOWrapper):
            text.reconfigure(errors="backslashreplace")
    for size in ("COLUMNS", "LINES"):
        if not os.environ.get(size, "0").strip("0"):
            os.environ.pop(size, None)
    sys.exit(run())
