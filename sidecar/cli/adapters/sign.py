"""sign and verify: who stands for an adapter's bytes."""

from __future__ import annotations

from pathlib import Path

import click

from lora_fs.sidecar.cli.options import parameters
from lora_fs.sidecar.cli.options.command import command
from lora_fs.sidecar.cli.options.context import Context
from lora_fs.sidecar.cli.options.values import Place
from lora_fs.sidecar.cli.output import Format
from lora_fs.sidecar.errors import Conflict, InputError, InvalidAdapter, TrustUnreadable
from lora_fs.sidecar.registry.lifecycle import artifacts
from lora_fs.sidecar.registry.volume import atomic
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.trust import BUNDLE, Refusal, Trust, read_bundle
from lora_fs.sidecar.trust.trust_file import EXTRA
from lora_fs.sidecar.validate import validate


@command()
@parameters.path
@click.option("--key", type=Place(), required=True, help="The private key, in PEM, of an elliptic curve")
@click.option("--password-file", type=Place(), help="A file with the key's password")
@click.option(
    "--certificate", type=Place(), help="The key's certificate, in PEM; its issuers may stand behind it"
)
@click.option("--force", is_flag=True, help="Replace a signature that is there")
@parameters.dry_run
@parameters.output
@click.pass_obj
def sign(
    context: Context,
    path: str,
    key: Path,
    password_file: Path | None,
    certificate: Path | None,
    force: bool,
    dry_run: bool,
    output: Format,
) -> None:
    """Sign every file of the folder PATH; the signature is PATH/model.sig.

    `model_signing verify` takes it, too.

    \b
    Examples:
      lora-fs sign ./support-lora --key signing.pem
      lora-fs sign ./support-lora --key signing.pem --certificate signing.crt
    """
    try:
        from lora_fs.sidecar.trust import sign as signing
    except ImportError as error:
        raise InputError(EXTRA) from error
    folder = resolve(path)
    target = folder / BUNDLE
    if not folder.is_dir():
        raise InputError(f"{path} is not a folder")
    if target.exists() and not force:
        raise Conflict(f"{target} is there: sign anew with --force")
    password = _bytes(password_file).strip() if password_file is not None else None
    certificates = _bytes(certificate) if certificate is not None else None
    signature = signing.sign(folder, _bytes(key), password=password, certificates=certificates)
    if not dry_run:
        atomic.replace(target, signature)
    if not context.printed({"dry_run": dry_run, "signature": str(target)}, output, [str(target)]):
        context.say(f"{'would sign' if dry_run else 'signed'} {path}: {target}")


@command()
@parameters.path
@click.option("--trust", type=Place(), help="The trust file  [env var: LORA_FS_TRUST]")
@parameters.output
@click.pass_obj
def verify(context: Context, path: str, trust: Path | None, output: Format) -> None:
    """Check that a trusted signer signed the adapter in PATH; exit 5 if none did.

    Who may sign is what the trust file says of the namespace.

    \b
    Examples:
      lora-fs verify ./support-lora --trust trust.yaml
      lora-fs verify ./support-lora --trust trust.yaml -n team-a -o json
    """
    chosen = trust or context.settings.trust
    if chosen is None:
        raise click.UsageError("say who may sign: --trust FILE or LORA_FS_TRUST")
    folder, namespace = resolve(path), context.settings.namespace
    files = validate(folder, contents=False).served_files
    if not files:
        raise InputError(f"{path} holds no adapter: `lora-fs validate {path}` says why")
    try:
        signer = Trust(chosen).check(namespace, artifacts.hash_files(folder, files), read_bundle(folder))
    except Refusal as refusal:
        if context.printed(_told(None, refusal), output, [refusal.code]):
            raise click.exceptions.Exit(5) from refusal
        raise InvalidAdapter(str(folder), [refusal.finding]) from refusal
    except TrustUnreadable as error:
        if trust is None:  # the environment's file may come later
            raise
        raise InputError(str(error)) from error
    if not context.printed(_told(signer, None), output, [signer or ""]):
        told = f"is signed by {signer}" if signer else f"needs no signature in namespace {namespace}"
        context.say(f"{path} {told}")


def _told(signer: str | None, refusal: Refusal | None) -> dict[str, object]:
    findings = [] if refusal is None else [refusal.finding.model_dump(mode="json")]
    return {"ok": refusal is None, "signer": signer, "findings": findings}


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


COMMANDS = (sign, verify)
