"""``s3://`` and ``gs://`` by fsspec: a folder of the bucket, a tar, or a ``.safetensors`` with its config.

Credentials, region and endpoint are what s3fs and gcsfs find by themselves: AWS_*, AWS_ENDPOINT_URL_S3,
the profile, the pod's role; GOOGLE_APPLICATION_CREDENTIALS and its kin. Every read asks for the etag that
was looked at.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, SourceUnavailable, install_extra
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.sources.offer import ARCHIVE, Changed, Offer, Options, Piece, wanted
from lora_fs.sidecar.sources.remote.connection import waited
from lora_fs.sidecar.sources.uri import Uri
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.folder import WEIGHTS_FILE

PACKAGES = {"s3": ("s3fs", "s3", "S3FileSystem"), "gs": ("gcsfs", "gcs", "GCSFileSystem")}
CHUNK_BYTES = 4 << 20
_WITHOUT_END = 1 << 62
_MEANT = frozenset(
    {"ProfileNotFound", "ConfigParseError", "ConfigNotFound", "NoRegionError", "EndpointResolutionError"}
)
_USERINFO = re.compile(r"//[^/@\s]*@")

logger = logging.getLogger(__name__)

Entry = Mapping[str, Any]


class Bucket:
    """One object, or the objects of one folder."""

    def __init__(self, uri: Uri, options: Options) -> None:
        self._uri, self._stall_s, self._alive = uri, options.stall_s, options.alive
        if not uri.path:
            raise InputError(f"{uri}: write {uri.scheme}://bucket/folder, or the object's whole key")
        try:
            self._fs = _filesystem(uri, options.stall_s)
        except Exception as error:
            raise self._told(error) from error
        self._path = "/".join((uri.place, *uri.path))

    def look(self) -> Offer:
        entry = self._ask(lambda: self._fs.info(self._path))
        marks = entry["type"] != "directory" and not entry["size"]  # an object that stands for a folder
        if entry["type"] != "directory" and not marks:
            return self._of_object(entry)
        listed = self._ask(lambda: self._fs.ls(self._path, detail=True))
        listed = [one for one in listed if str(one["name"]).rstrip("/") != self._path]
        if marks and not listed:
            raise InputError(f"{self._uri} is an object of 0 bytes, and nothing lies below it")
        if self._uri.sha256:
            raise InputError(f"{self._uri} is a folder: #sha256= is of one object")
        found = {str(one["name"]).rpartition("/")[2]: one for one in listed if one["type"] == "file"}
        try:
            names = wanted({name: one["size"] for name, one in found.items()})
        except InputError as error:
            raise InputError(f"{self._uri}: {error}") from error
        return self._offer([(name, found[name], None) for name in names])

    def close(self) -> None:
        """fsspec keeps its connections for the next one."""

    def _of_object(self, entry: Entry) -> Offer:
        if not self._path.endswith(".safetensors"):
            return self._offer([(ARCHIVE, entry, self._uri.sha256)])
        beside = self._path.rpartition("/")[0] + f"/{CONFIG_FILE}"
        try:
            config = self._ask(lambda: self._fs.info(beside))
        except NotFound as error:
            raise NotFound(
                f"{self._uri} is weights alone, and no {CONFIG_FILE} lies beside it: put it there, or "
                "give a tar of both"
            ) from error
        return self._offer([(CONFIG_FILE, config, None), (WEIGHTS_FILE, entry, self._uri.sha256)])

    def _offer(self, chosen: list[tuple[str, Entry, str | None]]) -> Offer:
        """The pin is over the names and etags: another file in the folder, or another version, is another."""
        pieces, rows = [], []
        for name, entry, sha256 in chosen:
            etag = str(entry.get("ETag") or entry.get("etag") or "")
            rows.append(f"{name} {f'sha256:{sha256}' if sha256 else etag}")
            read = self._s3 if self._uri.scheme == "s3" else self._any
            pieces.append(Piece(name, entry["size"], read(entry, etag), bool(etag), sha256))
        if not all(piece.ranged for piece in pieces):
            return Offer(str(self._uri), None, tuple(pieces))
        pin = rows[0].partition(" ")[2] if len(rows) == 1 else f"etags:{_digest(chr(10).join(rows))}"
        return Offer(str(self._uri), pin, tuple(pieces))

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            self._fs.invalidate_cache()
            return waited(call, self._alive)
        except Exception as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> LoraFsError:
        if isinstance(error, LoraFsError):
            return error
        if isinstance(error, FileNotFoundError):
            return NotFound(f"{self._uri}: the bucket has no such object or folder")
        name = type(error).__name__
        if isinstance(error, PermissionError) or "Credentials" in name:
            return InputError(
                f"{self._uri} may not be read with the credentials found here ({name}): set them in the "
                "environment, or give the pod a role"
            )
        if name in _MEANT or (isinstance(error, ValueError) and not name.endswith("DecodeError")):
            first = (str(error).strip().splitlines() or [name])[0]
            return InputError(f"{self._uri}: {_USERINFO.sub('//', first)[:200]} ({name})")
        logger.debug("%s failed", self._uri, exc_info=error, extra=event("source.failed", uri=self._uri))
        return SourceUnavailable(f"{self._uri}: {self._uri.scheme} does not answer{_where(error)} ({name})")

    # -- reading -------------------------------------------------------------------------------

    def _any(self, entry: Entry, etag: str) -> Any:
        """By parts, for any filesystem of fsspec; the etag is compared before each."""

        @contextmanager
        def read(start: int, end: int | None) -> Iterator[Iterator[bytes]]:
            def parts() -> Iterator[bytes]:
                at, to = start, min(end if end is not None else _WITHOUT_END, entry["size"])
                while at < to:
                    now = self._ask(lambda: self._fs.info(entry["name"]))
                    if str(now.get("ETag") or now.get("etag") or "") != etag:
                        raise Changed(f"{self._uri} was replaced while it was fetched: ask again")
                    upto = min(at + CHUNK_BYTES, to)
                    yield self._ask(partial(self._fs.cat_file, entry["name"], start=at, end=upto))
                    at = upto

            yield parts()

        return read

    def _s3(self, entry: Entry, etag: str) -> Any:
        """Read the object as one stream, from s3fs's own client: one request for all of it."""
        from fsspec.asyn import sync

        bucket, _, key = str(entry["name"]).partition("/")

        @contextmanager
        def read(start: int, end: int | None) -> Iterator[Iterator[bytes]]:
            part = {"Range": f"bytes={start}-{end - 1 if end is not None else ''}"}
            asked = {"Bucket": bucket, "Key": key, **(part if start or end is not None else {})}
            try:
                answer = self._fs.call_s3("get_object", **asked, **({"IfMatch": etag} if etag else {}))
            except Exception as error:
                if "PreconditionFailed" in repr(error.__cause__):
                    raise Changed(f"{self._uri} was replaced while it was fetched: ask again") from error
                raise self._told(error) from error
            body = answer["Body"]

            async def more() -> bytes:
                """A few MiB at a time: to hand each packet to this thread would cost more than it."""
                got = bytearray()
                while len(got) < CHUNK_BYTES and (data := await body.read(CHUNK_BYTES)):
                    got += data
                return bytes(got)

            def chunks() -> Iterator[bytes]:
                while True:
                    try:
                        chunk = sync(self._fs.loop, more, timeout=self._stall_s)
                    except Exception as error:
                        why = type(error).__name__
                        raise SourceUnavailable(f"{self._uri}: the connection broke ({why})") from error
                    if not chunk:
                        return
                    yield chunk

            try:
                yield chunks()
            finally:
                self._fs.loop.call_soon_threadsafe(body.close)

        return read


def _filesystem(uri: Uri, stall_s: float) -> Any:
    module, extra, name = PACKAGES[uri.scheme]
    try:
        factory = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise InputError(f"{uri.scheme}:// needs {module}: {install_extra(extra)}") from error
    if uri.scheme == "s3":
        seconds = {"connect_timeout": stall_s, "read_timeout": stall_s}
        return factory(config_kwargs=seconds, use_listings_cache=False)
    logging.getLogger(module).setLevel(logging.CRITICAL)  # gcsfs writes a traceback for what is raised here
    return factory(use_listings_cache=False)


def _where(error: Exception) -> str:
    """Which endpoint was asked, if the error says it."""
    told = getattr(error, "kwargs", None)  # as botocore has it
    endpoint = urlsplit(str(told.get("endpoint_url") or "")) if isinstance(told, dict) else None
    if endpoint is not None and endpoint.netloc:
        return f" at {endpoint.scheme}://{endpoint.netloc.rpartition('@')[2]}"
    host, port = getattr(error, "host", None), getattr(error, "port", None)  # as aiohttp has it
    return f" at {host}:{port}" if host and port else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
