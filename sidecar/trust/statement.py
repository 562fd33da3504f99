"""What a signature says: a SHA-256 for each file, and one over all of them. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.model import FileEntry
from lora_fs.sidecar.trust.refusal import Refusal

TYPE: Final = "https://in-toto.io/Statement/v1"
PREDICATE: Final = "https://model_signing/signature/v1.0"
IGNORED: Final = ("model.sig", ".git", ".gitattributes", ".github", ".gitignore")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True)  # a field that it does not know is a later version's


class _Serialization(_Part):
    method: str
    hash_type: str


class _Resource(_Part):
    name: str
    digest: str
    algorithm: str


class _Predicate(_Part):
    serialization: _Serialization
    resources: list[_Resource]


class _Statement(_Part):
    predicateType: str
    subject: list[dict[str, Any]]
    predicate: _Predicate


def signed_files(payload: bytes) -> dict[str, str]:
    """Return each signed file's SHA-256, by its path. Call it with the payload of a verified signature.

    Raises:
        Refusal: it is no statement of model signing, or was made with other hashes than SHA-256 of files.
    """
    try:
        value = json.loads(payload)
        kind = value.get("_type") if isinstance(value, dict) else None
        statement = _Statement.model_validate(value)
    except (ValidationError, ValueError, RecursionError) as error:
        raise Refusal("untrusted", "signs no statement of model signing") from error
    if (kind, statement.predicateType) != (TYPE, PREDICATE) or len(statement.subject) != 1:
        raise Refusal("untrusted", f"signs a {shown(statement.predicateType)}; {PREDICATE} is read")
    said = statement.predicate.serialization
    if (said.method, said.hash_type) != ("files", "sha256"):
        told = f"{shown(said.hash_type)} of {shown(said.method)}"
        raise Refusal("untrusted", f"has {told}", "sign it with sha256 of whole files, the default")
    found = {one.name: one.digest for one in statement.predicate.resources if one.algorithm == "sha256"}
    if len(found) != len(statement.predicate.resources):
        raise Refusal("untrusted", "names a file twice, or has another hash than sha256")
    return found


def check(signed: Mapping[str, str], files: Iterable[FileEntry]) -> None:
    """Check that every file is signed, with its bytes. Ignores signed files that are not served.

    Raises:
        Refusal: a file is not among the signed ones, or has other bytes.
    """
    for entry in files:
        digest = signed.get(entry.path)
        if digest is None:
            raise Refusal("signature-mismatch", f"does not sign {entry.path}", "sign the folder again")
        if digest != entry.sha256:
            raise Refusal(
                "signature-mismatch",
                f"signs other bytes of {entry.path}: {shown(digest[:12])}…, not {entry.sha256[:12]}…",
                "these bytes were not signed: sign the folder again if they are meant",
            )


def state(name: str, digests: Mapping[str, str]) -> bytes:
    """Return the statement to sign. ``name``: the folder's name; ``digests``: SHA-256 by path."""
    every = sorted(digests.items())
    whole = hashlib.sha256(b"".join(bytes.fromhex(digest) for _, digest in every)).hexdigest()
    statement: dict[str, Any] = {
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": whole}}],
        "predicateType": PREDICATE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": [*IGNORED],
            },
            "resources": [{"name": path, "algorithm": "sha256", "digest": digest} for path, digest in every],
        },
    }
    return json.dumps(statement).encode()
