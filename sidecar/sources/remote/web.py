"""``http://`` and ``https://``: a tar, or a single ``.safetensors`` with its config beside it.

A redirect may lead to ``http`` and ``https`` alone, never from the second to the first, and only
where ``Options.check`` lets it go. Credentials come from the URL's userinfo, or from the netrc file by the
URL's host. They go to that scheme, host and port, and to no redirect's target elsewhere. Plain ``http`` to
another machine needs ``#sha256=``, also where a redirect leads there. Every wait ends once ``Options.alive``
says that it is over.
"""

from __future__ import annotations

import base64
import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urljoin

from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, SourceUnavailable
from lora_fs.sidecar.sources.offer import ARCHIVE, Changed, NotRanged, Offer, Options, Piece, Read, put_off
from lora_fs.sidecar.sources.remote.connection import is_loopback, opener
from lora_fs.sidecar.sources.remote.passwords import of_netrc
from lora_fs.sidecar.sources.uri import WEB, Uri, parse, redacted, scheme_of, sendable
from lora_fs.sidecar.validate.config.adapter_config import CONFIG_FILE
from lora_fs.sidecar.validate.folder import WEIGHTS_FILE

CHUNK_BYTES = 1 << 20
MOST_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SIZE = r"[0-9]{1,18}"
_RANGE = re.compile(rf"bytes ({_SIZE})-{_SIZE}/({_SIZE}|\*)")
BUSY = frozenset({429, 503})
_RETRIED = frozenset({408, 425, 500, 502, 504}) | BUSY

Answer = http.client.HTTPResponse


class Web:
    """One file, or two."""

    def __init__(self, uri: Uri, options: Options) -> None:
        def check(to: Uri) -> None:
            options.check(to)
            self._check_plain(to)

        self._uri, self._http = uri, Http(replace(options, check=check))

    def look(self) -> Offer:
        self._check_plain(self._uri)
        single = bool(self._uri.path) and self._uri.path[-1].endswith(".safetensors")
        piece, pin = self._piece(self._uri, WEIGHTS_FILE if single else ARCHIVE)
        if not single:
            return Offer(str(self._uri), pin, (piece,))
        try:
            config, config_pin = self._piece(self._uri.beside(CONFIG_FILE), CONFIG_FILE)
        except NotFound as error:
            raise NotFound(
                f"{self._uri} is weights alone, and no {CONFIG_FILE} lies beside it: put it there, or "
                "give a tar of both"
            ) from error
        return Offer(str(self._uri), f"{pin} {config_pin}" if pin and config_pin else None, (config, piece))

    def close(self) -> None:
        """Nothing is held."""

    def _check_plain(self, uri: Uri) -> None:
        if uri.scheme == "http" and not self._uri.sha256 and not is_loopback(uri.place):
            raise InputError(
                f"{uri}: whoever is on the way could replace it: write https://, or say which file it "
                "has to be with #sha256=…"
            )

    def _piece(self, uri: Uri, name: str) -> tuple[Piece, str | None]:
        seen = self._http.look(uri)
        pin = f"sha256:{uri.sha256}" if uri.sha256 else seen.validator
        read = self._http.reader(uri, seen.size_bytes, seen)
        ranged = seen.ranged and seen.size_bytes is not None and pin is not None
        return Piece(name, seen.size_bytes, read, ranged, uri.sha256), pin


class Seen:
    """The facts in a file's headers."""

    def __init__(self, answer: Answer) -> None:
        headers = answer.headers
        etag, modified = headers.get("ETag", ""), headers.get("Last-Modified")
        self.ranged = answer.status == 206
        length = headers.get("Content-Length", "")
        known = answer.status == 200 and re.fullmatch(_SIZE, length)
        self.size_bytes = int(length) if known else None
        match = _RANGE.fullmatch(headers.get("Content-Range", "")) if self.ranged else None
        if match and match[2] != "*":
            self.size_bytes = int(match[2])
        strong = etag if etag and not etag.startswith("W/") else None
        self.validator = strong or (f"{modified} {self.size_bytes}" if modified else None)


class Http:
    """GET by the standard library, redirects looked at one by one."""

    def __init__(self, options: Options, headers: Mapping[str, str] | None = None) -> None:
        """``headers`` go to the host of the URL, and to none that it redirects to.

        An ``Authorization`` among them is sent rather than the netrc file's password.
        """
        self._options, self._headers = options, dict(headers or {})

    def look(self, uri: Uri) -> Seen:
        """Look at the file by a request for its first byte: a signed URL allows GET alone."""
        with self.get(uri, {"Range": "bytes=0-0"}) as answer:
            seen = Seen(answer)
            if answer.status == 416:
                raise InputError(f"{uri} is empty")
            return seen

    def reader(self, uri: Uri, size_bytes: int | None, seen: Seen | None = None) -> Read:
        """A reader of a file of that size. ``seen``: its state at the look; None: its URL pins its bytes."""

        @contextmanager
        def read(start: int, end: int | None) -> Iterator[Iterator[bytes]]:
            part = start > 0 or end is not None
            headers = {"Range": f"bytes={start}-{end - 1 if end is not None else ''}"} if part else {}
            with self.get(uri, headers) as answer:
                now = Seen(answer)
                if answer.status == 416:
                    raise Changed(
                        f"{uri}: the server has fewer bytes than the {size_bytes} it announced: ask again"
                    )
                if seen is not None and now.validator != seen.validator:
                    raise Changed(f"{uri} was replaced while it was fetched: ask again")
                if part and answer.status == 200:
                    raise NotRanged(f"{uri}: the server sends whole files alone")
                match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
                if part and (match is None or int(match[1]) != start or now.size_bytes != size_bytes):
                    raise SourceUnavailable(f"{uri}: the server sent another part than the one asked for")
                yield self._chunks(uri, answer)

        return read

    def whole(self, told: Uri, answer: Answer, most_bytes: int) -> bytes:
        """All of a small answer. ``told`` is what an error names.

        Raises:
            InputError: it is larger than ``most_bytes``. SourceUnavailable: it broke off.
        """
        data = bytearray()
        for chunk in self._chunks(told, answer):
            data += chunk
            if len(data) > most_bytes:
                raise InputError(f"{told}: the server's answer has more than {most_bytes} bytes")
        return bytes(data)

    def _chunks(self, uri: Uri, answer: Answer) -> Iterator[bytes]:
        while True:
            try:
                chunk = answer.read1(CHUNK_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise SourceUnavailable(f"{uri}: the connection broke: {_why(error)}") from error
            if not chunk:
                return
            yield chunk

    @contextmanager
    def get(self, uri: Uri, headers: Mapping[str, str]) -> Iterator[Answer]:
        """The answer to a GET, redirects followed.

        Raises:
            NotFound, InputError: the server says so, or a redirect leads where it may not.
            SourceUnavailable: the server does not answer, or not now.
        """
        origin, at = uri, uri
        secrets = {**self._headers, **self._credentials(origin, own="Authorization" not in self._headers)}
        for _ in range(MOST_REDIRECTS + 1):
            told = {} if at is origin else self._credentials(at, own=False)
            answer = self._ask(at, {**headers, **(secrets if _same_host(at, origin) else {}), **told})
            with answer:
                target = answer.headers.get("Location")
                if answer.status in _REDIRECTS and target:
                    at = self._redirected(origin, at, target)
                    continue
                self._check(origin, answer)
                yield answer
                return
        raise InputError(f"{origin} redirects more than {MOST_REDIRECTS} times")

    def _redirected(self, origin: Uri, at: Uri, target: str) -> Uri:
        try:
            to = urljoin(at.request, sendable(target, "latin-1")).partition("#")[0]  # as headers are decoded
        except ValueError as error:  # it may quote a password
            raise InputError(f"{origin} redirects to what is no URL") from error
        try:
            if scheme_of(to) not in WEB or (at.scheme, scheme_of(to)) == ("https", "http"):
                raise InputError("it is followed to https, and from http to http, alone")
            uri = parse(to, redirect=True)
            self._options.check(uri)
            return uri
        except InputError as error:
            raise InputError(f"{origin} redirects to {redacted(to)}: {error}") from error

    def _ask(self, uri: Uri, headers: Mapping[str, str]) -> Answer:
        self._options.alive()
        asked = {"User-Agent": "lora-fs", "Accept-Encoding": "identity", **headers}
        request = urllib.request.Request(uri.request, headers=asked)
        try:
            opened = opener(self._options.alive, partial(self._options.check_address, uri))
            answer = opened.open(request, timeout=self._options.stall_s)
        except (OSError, http.client.HTTPException, urllib.error.URLError, UnicodeError) as error:
            raise SourceUnavailable(f"{uri.scheme}://{uri.place} does not answer: {_why(error)}") from error
        assert isinstance(answer, Answer)
        return answer

    def _credentials(self, uri: Uri, *, own: bool) -> dict[str, str]:
        """The password's header: of a URL's userinfo; else, for the source's ``own``, of the netrc file."""
        path = self._options.netrc_file if own else None
        return _basic(uri.userinfo) or _basic(of_netrc(uri.place, path), quoted=False)

    def _check(self, uri: Uri, answer: Answer) -> None:
        status = answer.status
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise InputError(f"{uri}: the server packs it on the way, so its bytes cannot be checked")
        if status in (200, 206, 416):
            return
        if status in (404, 410):
            raise NotFound(f"{uri}: the server has no such file ({status})")
        if status in (401, 403, 407):
            raise InputError(
                f"{uri}: the server refuses it ({status}): a password for its host goes into the file that "
                "LORA_FS_NETRC_FILE names"
            )
        kind: type[LoraFsError] = SourceUnavailable if status in _RETRIED else InputError
        error = kind(f"{uri}: the server answered {status} {answer.reason[:80]!a}")
        raise put_off(error, answer.headers.get("Retry-After") if status in BUSY else None)


def _same_host(one: Uri, other: Uri) -> bool:
    """Whether both have the same scheme, host and port."""
    return (one.scheme, one.place) == (other.scheme, other.place)


def _basic(text: str | None, *, quoted: bool = True) -> dict[str, str]:
    """The header for ``user:password``, which a URL has ``quoted``; none without a user."""
    user, _, password = map(unquote if quoted else str, (text or "").partition(":"))
    if not user:
        return {}
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def _why(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    error = reason if isinstance(reason, BaseException) else error
    if isinstance(error, TimeoutError):
        return "nothing came in time"
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__)[:160]
