"""The command group, and the one place where errors become exit codes.

Each command's module is imported on its first use: most need libraries that the others do not, and
the list of commands needs none of them.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, Final

import click

from lora_fs.sidecar import __version__
from lora_fs.sidecar.cli import trail
from lora_fs.sidecar.cli.exit_codes import FAILED, INTERRUPTED, exit_code
from lora_fs.sidecar.cli.options.command import OPTIONS
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.output import complain, unread
from lora_fs.sidecar.errors import LoraFsError

COMPLETE: Final = "_LORA_FS_COMPLETE"  # click's variable: a shell asks for its script or for proposals

# Section → command → its module and the first sentence of its help.
SECTIONS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Adapters": {
        "register": (
            "adapters.register",
            "Register the adapter in SOURCE under NAME: a folder, or hf://, oci://, s3://, gs://, https:// or pvc://",
        ),
        "apply": (
            "adapters.apply",
            "Register and change adapters as documents in YAML say; one that cannot be stops no other",
        ),
        "validate": (
            "adapters.validate",
            "Check the adapter in PATH as register would; exit 5 if no engine can serve it",
        ),
        "sign": ("adapters.sign", "Sign every file of the folder PATH; the signature is PATH/model.sig"),
        "verify": (
            "adapters.sign",
            "Check that a trusted signer signed the adapter in PATH; exit 5 if none did",
        ),
        "unregister": ("adapters.names", "Unregister NAME on every replica"),
        "set": ("adapters.amend", "Change NAME's policy, labels or retention"),
        "pin": ("adapters.amend", "Never evict NAME"),
        "unpin": ("adapters.amend", "Restore the policy that NAME had before its pin"),
    },
    "Revisions": {
        "evaluate": (
            "adapters.evaluate",
            "Ask the same cases of NAME@REVISION and of another revision; compare, and hold it to a gate",
        ),
        "promote": ("adapters.names", "Let NAME serve REVISION"),
        "rollback": ("adapters.names", "Let NAME serve the revision it served before"),
        "canary": (
            "adapters.canary",
            "Let REVISION answer a share of the requests for NAME; change, finish or abort that",
        ),
    },
    "Look": {
        "list": (
            "look.listing",
            "List the registered adapters; * marks the revision that the plain name serves",
        ),
        "show": ("look.show", "Show NAME: what it serves, and each of its revisions"),
        "get": ("look.get", "List the registered adapters, or show NAME"),
        "status": (
            "look.status",
            "Show every adapter on every replica; a line marked ! is a replica's problem",
        ),
        "top": ("look.top", "Watch replicas, loaded adapters, rates, and the adapters that fail or are busy"),
        "events": ("look.events", "Show recent events of every replica, of NAME or of all adapters"),
        "wait": (
            "look.wait",
            "Wait until every replica has NAME ready, or gone, or in a condition; exit 6 if one does not",
        ),
    },
    "Serve": {
        "sidecar": (
            "serve.sidecar",
            "Serve one replica: reconcile its vLLM to the registry, answer and proxy the API",
        ),
        "gateway": (
            "serve.gateway",
            "Answer for a fleet at one address: pass each request to a replica that has its adapter",
        ),
        "demo": (
            "serve.sidecar",
            "Run two real vLLM replicas on one folder and walk through what lora-fs does",
        ),
        "install-plugin": (
            "serve.install",
            "Copy the vLLM plugin, with what it needs and vLLM lacks, to DIR for another container's vLLM",
        ),
    },
    "Volume": {
        "init": (
            "volume.init",
            "Make the registry's folder a registry; exit 0 and change nothing if it is one",
        ),
        "quota": ("volume.quota", "Show the namespace's quota and what it uses; with options, set the quota"),
        "doctor": (
            "volume.doctor",
            "Check the volume: its filesystem, its promises, every record of the scope, every replica",
        ),
        "gc": (
            "volume.gc",
            "Remove files of adapters unregistered long ago, leftovers of interrupted writes, old history",
        ),
        "fsck": (
            "volume.backup",
            "Look for what is wrong in the whole registry: damaged records, lost or changed files, leftovers",
        ),
        "export": ("volume.backup", "Write the registry to FILE as one tar; - is stdout"),
        "import": (
            "volume.backup",
            "Restore an archive that export wrote, or register another system's adapters",
        ),
    },
    "lora-fs": {
        "version": ("about", "Show the version of lora-fs and of Python"),
        "help": ("about", "Show the page of COMMAND, or the list of commands"),
    },
}
COMMANDS: Final = {name: entry for section in SECTIONS.values() for name, entry in section.items()}
# What users of other tools type.
ALIASES: Final = {"ls": "list", "describe": "show", "delete": "unregister"}


class Lazy(MutableMapping[str, click.Command]):
    """Commands by name, each imported on its first use."""

    def __init__(self) -> None:
        self._imported: dict[str, click.Command] = {}

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._imported and name in COMMANDS:
            for command in import_module(f"lora_fs.sidecar.cli.{COMMANDS[name][0]}").COMMANDS:
                trail.audited(command)
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

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, f"{told}.") for name, (_, told) in commands.items()])


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
    params=list(OPTIONS),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="lora-fs")
@click.pass_context
def cli(context: click.Context, /, **_: Any) -> None:
    """Register LoRA adapters on a shared volume; every vLLM replica serves them.

    The registry's options stand before the command or behind it.

    \b
    Examples:
      lora-fs init --root /adapters
      lora-fs register support ./support-lora --root /adapters --model Qwen/Qwen2.5-7B
      lora-fs status
      lora-fs unregister support

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 conflict, 5 invalid adapter;
    6 timed out waiting, 7 over quota, 8 apply --dry-run differs, 130 interrupted.

    \b
    Shell completion: eval "$(_LORA_FS_COMPLETE=bash_source lora-fs)", or zsh_source; for fish:
      _LORA_FS_COMPLETE=fish_source lora-fs | source
    """
    context.ensure_object(Context)


def run(arguments: list[str] | None = None) -> int:
    """Run one command line; returns its documented exit code. Every known error is one sentence."""
    try:
        code = cli.main(arguments, prog_name="lora-fs", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        with suppress(OSError):  # nobody reads why
            error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", INTERRUPTED)
    except LoraFsError as error:
        return _fail(str(error), exit_code(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        return _fail(f"{where}{error.strerror or error}", FAILED)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # nobody reads why
        complain(message)
    return code


def _interrupt(*_: object) -> None:
    """Raise what Ctrl-C raises, once: ``timeout`` sends its signal twice, and the first one tidies up."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """The script's entry.

    SIGTERM ends a command as Ctrl-C does, which removes what is half written. The kernel keeps a signal
    without a handler from a container's first process. A closed stream has no reader. A character that its
    encoding lacks is escaped. A terminal's size of 0 is none. pydantic looks for no plugin, which opens the
    metadata of each installed package, unless PYDANTIC_DISABLE_PLUGINS is set. The collector runs while a
    command works, not while modules load or at the exit: that was a fifth of the time of ``list``.
    """
    gc.disable()
    signal.signal(signal.SIGTERM, _interrupt)
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
        if isinstance(text := getattr(sys, stream), io.TextIOWrapper):
            text.reconfigure(errors="backslashreplace")
    for size in ("COLUMNS", "LINES"):
        if not os.environ.get(size, "0").strip("0"):
            os.environ.pop(size, None)
    if COMPLETE in os.environ:
        import_module("lora_fs.sidecar.cli.options.completion").use()
    code = run()
    gc.freeze()
    sys.exit(code)
