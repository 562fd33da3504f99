"""The Distribution API of one repository: GET alone, with a token where the registry asks for one.

A registry redirects to where it keeps blobs, and names the server that gives tokens. Both may be public
addresses only, unless LORA_FS_ALLOWED_REMOTES names their host. A password goes to the registry and to
its server of tokens; a token goes to the registry. No redirect gets either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from urllib.parse import quote, urlsplit

from lora_fs.sidecar.errors import InputError, NotFound, SourceUnavailable
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.connection import is_loopback
from lora_fs.sidecar.sources.remote.oci.credentials import basic
from lora_fs.sidecar.sources.remote.oci.reference import Reference
from lora_fs.sidecar.sources.remote.web import Answer, Http
from lora_fs.sidecar.sources.uri import Uri, parse

MOST_TOKEN_BYTES = 64 << 10
_CHALLENGE = re.compile(r"\s*(Basic|Bearer)\b", re.IGNORECASE)
_PARAMETER = re.compile(r'([a-z]+)="([^"\x00-\x1f]{0,1000})"')
_TOKEN = re.compile(r"[\x21-\x7e]+")


class _Asked(InputError):
    """The registry asks who it is. ``challenge``: the answer that it wants."""

    def __init__(self, text: str, challenge: str) -> None:
        super().__init__(text)
        self.challenge = challenge


class Repository(Http):
    """Reads manifests and blobs of one repository. ``told``: the URI that errors name."""

    def __init__(self, told: Uri, reference: Reference, options: Options) -> None:
        def check_address(to: Uri, address: str) -> None:
            own = to.place == reference.base.place
            options.check_address(told if own else to, address)

        # The registry names hosts that nobody can list: so any public address is fine.
        super().__init__(replace(options, check=lambda _: None, check_address=check_address))
        self._told, self._reference = told, reference

    def body(self, uri: Uri, accept: str, most_bytes: int) -> tuple[bytes, str]:
        """All of a small answer, and its ``Docker-Content-Digest``, if it has one.

        Raises:
            InputError: it is larger than ``most_bytes``. See ``Http.get``.
        """
        with self.get(uri, {"Accept": accept}) as answer:
            data = self.whole(self._told, answer, most_bytes)
            return data, answer.headers.get("Docker-Content-Digest", "")

    @contextmanager
    def get(self, uri: Uri, headers: Mapping[str, str]) -> Iterator[Answer]:
        """As ``Http.get``. If the registry asks for credentials, send the request again with them."""
        with ExitStack() as stack:
            try:
                answer = stack.enter_context(super().get(uri, headers))
            except _Asked as asked:
                self._headers = {"Authorization": self._authorization(asked)}
                answer = stack.enter_context(super().get(uri, headers))
            yield answer

    def _credentials(self, uri: Uri, *, own: bool) -> dict[str, str]:
        return {}  # sent when the server asks for them

    def _authorization(self, asked: _Asked) -> str:
        place = self._reference.base.place
        password = basic(place, self._reference.repository, self._options)
        kind = _CHALLENGE.match(asked.challenge)
        if kind is None or (kind[1].lower() == "basic" and password is None):
            raise asked
        if kind[1].lower() == "basic":
            assert password is not None
            return password
        return f"Bearer {self._token(dict(_PARAMETER.findall(asked.challenge)), password)}"

    def _token(self, told: Mapping[str, str], password: str | None) -> str:
        """Ask the server that the registry names for a token that may pull this repository, and no more."""
        asks = f"service={quote(told.get('service', ''))}&scope=repository:{self._reference.repository}:pull"
        realm = told.get("realm", "")
        try:
            server = parse(f"{realm}{'&' if '?' in realm else '?'}{asks}", redirect=True)
        except InputError as error:
            raise InputError(f"{self._told}: the registry names no server that gives tokens") from error
        plain = server.scheme == "http" and is_loopback(server.place) and is_loopback(self._told.place)
        if not (server.scheme == "https" or plain) or server.userinfo:
            raise InputError(f"{self._told}: the registry's server of tokens is not asked over https")
        client = Http(
            replace(self._options, netrc_file=None), {"Authorization": password} if password else {}
        )
        with client.get(server, {"Accept": "application/json"}) as answer:
            data = client.whole(self._told, answer, MOST_TOKEN_BYTES)
        try:
            body = json.loads(data)
            token = body.get("token") or body.get("access_token")
        except (ValueError, AttributeError, RecursionError) as error:
            raise SourceUnavailable(f"{self._told}: its server of tokens gave no JSON") from error
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            raise SourceUnavailable(f"{self._told}: its server of tokens gave no token")
        return token

    def _check(self, uri: Uri, answer: Answer) -> None:
        status, by_registry = answer.status, urlsplit(answer.url).netloc.lower() == uri.place.lower()
        if status in (404, 410):
            raise NotFound(
                f"{self._told}: the registry has no such repository, tag, digest or blob ({status})"
            )
        if status in (401, 403):
            challenge = answer.headers.get("WWW-Authenticate", "")
            text = (
                f"{self._told}: the registry refuses it ({status}): a password that may pull goes into the "
                "file that LORA_FS_REGISTRY_AUTH_FILE or LORA_FS_NETRC_FILE names"
            )
            raise _Asked(text, challenge) if status == 401 and by_registry else InputError(text)
        super()._check(uri, answer)
