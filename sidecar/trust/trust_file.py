"""The trust file, read: signers, and the namespaces of each. YAML; a key or a certificate is text or a file.

signers:
- name: ml-team
  namespaces: [team-a]      # left out: all
  key: ml-team.pub          # a file beside this one, or the PEM itself
- name: release
  certificates: ca.pem
  subject: release@example.com
- name: ci
  identity: https://github.com/acme/adapters/.github/workflows/sign.yml@refs/heads/main
  issuer: https://token.actions.githubusercontent.com
  trustedRoot: trusted_root.json
unsigned: [playground]      # namespaces that need no signature
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lora_fs.sidecar import field_errors
from lora_fs.sidecar.errors import InputError, install_extra
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model.names import Segment

if TYPE_CHECKING:
    from lora_fs.sidecar.trust.signers import Method

MAX_FILE_BYTES: Final = 1 << 20
EXTRA: Final = f"cryptography is not installed: {install_extra('sign')}"
_PEM: Final = "-----BEGIN "
Text = Annotated[str, Field(min_length=1)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Entry(_Said):
    """One signer, as the file says it."""

    name: Segment
    namespaces: list[Segment] | None = None
    key: Text | None = None
    certificates: Text | None = None
    subject: Text | None = None
    identity: Text | None = None
    issuer: Text | None = None
    trustedRoot: Text | None = None

    @model_validator(mode="after")
    def _one_method(self) -> Entry:
        if sum(one is not None for one in (self.key, self.certificates, self.identity)) != 1:
            raise ValueError("give it one of key, certificates and identity")
        if self.subject is not None and self.certificates is None:
            raise ValueError("subject goes with certificates")
        if (self.identity is None) != (self.issuer is None) or (self.issuer is None) != (
            self.trustedRoot is None
        ):
            raise ValueError("identity, issuer and trustedRoot go together")
        return self


class TrustFile(_Said):
    """The file's own form."""

    signers: list[Entry] = []
    unsigned: list[Segment] = []

    @model_validator(mode="after")
    def _names_differ(self) -> TrustFile:
        if len({one.name for one in self.signers}) != len(self.signers):
            raise ValueError("two signers have one name")
        return self


@dataclass(frozen=True, slots=True)
class Signer:
    """Who may sign in some namespaces; None: in all."""

    name: str
    namespaces: frozenset[str] | None
    method: Method

    def covers(self, namespace: str) -> bool:
        """Whether it may sign the registered adapters there."""
        return self.namespaces is None or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class Signers:
    """Everyone who may sign. ``unsigned``: the namespaces that need no signature."""

    every: tuple[Signer, ...]
    unsigned: frozenset[str]


def parse(text: str, read: Callable[[str], bytes]) -> Signers:
    """Read a trust file's text.

    Args:
        read: reads a file that it names.
    Raises:
        InputError: a line or a field is wrong, or a key that it names is. OSError: a file cannot be read.
    """
    from lora_fs.sidecar import yaml_texts  # a command that checks no signature needs none

    try:
        tree = yaml_texts.parse(text, 1)
    except yaml_texts.Wrong as wrong:
        raise InputError(_place(wrong.line, wrong.field, wrong.why)) from wrong
    if tree is None or tree.value is None:
        return Signers((), frozenset())
    try:
        said = TrustFile.model_validate(tree.value)
    except ValidationError as error:
        path, why = field_errors.first(error)
        raise InputError(_place(tree.line_of(path), yaml_texts.shown_path(path), why)) from error
    every = []
    for entry in said.signers:
        namespaces = frozenset(entry.namespaces) if entry.namespaces is not None else None
        try:
            every.append(Signer(entry.name, namespaces, _method(entry, read)))
        except (InputError, ValueError) as error:
            raise InputError(f"signer {entry.name}: {error}") from error
    return Signers(tuple(every), frozenset(said.unsigned))


def _place(line: int, field: str, why: str) -> str:
    return f"line {line}: " + (f"{shown(field)}: {shown(why)}" if field else shown(why))


def _method(entry: Entry, read: Callable[[str], bytes]) -> Method:
    try:
        from cryptography.x509 import load_pem_x509_certificates

        from lora_fs.sidecar.trust import signers
    except ImportError as error:
        raise InputError(EXTRA) from error

    def pem(text: str) -> bytes:
        return text.encode() if text.startswith(_PEM) else read(text)

    if entry.key is not None:
        return signers.PublicKey(signers.public_key(pem(entry.key)))
    if entry.certificates is not None:
        try:
            roots = tuple(load_pem_x509_certificates(pem(entry.certificates)))
        except ValueError as error:
            raise InputError("its certificates are none in PEM") from error
        return signers.Authority(roots, entry.subject)
    if util.find_spec("sigstore") is None:
        raise InputError(f"sigstore is not installed: {install_extra('sign')}")
    from lora_fs.sidecar.trust.identities import Identity

    assert entry.identity is not None
    assert entry.issuer is not None
    assert entry.trustedRoot is not None
    return Identity(entry.identity, entry.issuer, read(entry.trustedRoot))


def read_file(path: Path) -> str:
    """Read a trust file's text. Raises OSError; InputError: it is too long, or no text."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError("it is no text in UTF-8") from error
