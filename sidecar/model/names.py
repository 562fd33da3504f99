"""The grammar of names, and what they identify: a scope, an adapter's revision."""

from __future__ import annotations

import re
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from lora_fs.sidecar.errors import InvalidName

SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
RESERVED_NAMESPACES = frozenset({"lora-fs.json", "HEAD"})
_SHORT = 12  # hexadecimal digits of a digest
_ENGINES = re.compile(rf"(.+)@[0-9a-f]{{{_SHORT}}}")


def _in_utf8(value: str) -> str:
    """Refuse half a character, which JSON lets a string hold and no file can keep."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{value!a} is no text in UTF-8") from error
    return value


# The length apart from the pattern: {0,254} in it takes 2 ms to compile, at each start of a command.
Segment = Annotated[str, Field(max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
FileName = Annotated[str, Field(max_length=255, pattern=r"^[^./\x00-\x1f][^/\x00-\x1f]*$")]
Text = Annotated[str, AfterValidator(_in_utf8)]
LabelKey = Annotated[str, Field(min_length=1)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


def check_segment(what: str, value: str) -> str:
    """Return ``value`` if it may become a folder's name, else raise InvalidName."""
    if not SEGMENT.fullmatch(value):
        raise InvalidName(
            what,
            value,
            "use 1 to 128 of A-Z a-z 0-9 . _ - and begin with a letter or a digit",
        )
    if what == "namespace" and value in RESERVED_NAMESPACES:
        raise InvalidName(what, value, "this name is kept for the registry's own files")
    return value


def model_slug(model: str) -> str:
    """Name the folder of a base model: ``Qwen/Qwen2.5-7B`` → ``Qwen--Qwen2.5-7B``.

    A filesystem path gives its last component, so that a model mounted at ``/models/llama``
    and served as ``llama`` are one scope.

    Raises:
        InvalidName: nothing usable is left.
    """
    bare = model.rstrip("/")
    if bare.startswith(("/", "./", "../", "~")):
        bare = bare.rsplit("/", 1)[-1]
    return check_segment("model", bare.replace("/", "--"))


def engine_name(public: str, digest: str) -> str:
    """Name bytes in an engine: ``sql@1f0c22ab34ef``, ``sql@v2@1f0c22ab34ef``. Other bytes get another."""
    return f"{public}@{_hex(digest)[:_SHORT]}"


def public_of(engine_name: str) -> str:
    """Return the name that clients know for an engine's name; one that ends in no digest is itself."""
    match = _ENGINES.fullmatch(engine_name)
    return match[1] if match is not None else engine_name


def tells_bytes(engine_name: str, digest: str) -> bool:
    """Whether an engine's name is the one for bytes of this digest."""
    return engine_name.endswith(f"@{_hex(digest)[:_SHORT]}")


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


class Scope(NamedTuple):
    """One base model of one tenant: the folder ``<namespace>/<model>``."""

    namespace: str
    model: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.model}"


class AdapterKey(NamedTuple):
    """The identity of a revision: ``namespace/model/revision/name``."""

    namespace: str
    model: str
    revision: str
    name: str

    @property
    def scope(self) -> Scope:
        return Scope(self.namespace, self.model)

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def checked(cls, namespace: str, model: str, revision: str, name: str) -> AdapterKey:
        """Build a key from text of unknown origin; raises InvalidName."""
        return cls(
            check_segment("namespace", namespace),
            check_segment("model", model),
            check_segment("revision", revision),
            check_segment("name", name),
        )
