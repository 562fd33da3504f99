"""HTTP to a sidecar: the token, and what its errors mean to a command.

It follows no redirect, since the token would follow, too. It turns a refusal into the error that the sidecar
raised, by its name, so that a command ends as it does at a volume.
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import httpx

from lora_fs.sidecar import __version__, errors
from lora_fs.sidecar.cli.output import complain
from lora_fs.sidecar.errors import (
    InputError,
    LoraFsError,
    OperatorError,
    ServerUnavailable,
    TokenRefused,
    UnknownOutcome,
)
from lora_fs.sidecar.escaping import shown

HEADER: Final = "X-Lora-Fs-Token"  # a wrong one is a 401; a wrong Authorization may be the engine's
ERROR: Final = "X-Lora-Fs-Error"
GATEWAY: Final = "lora-fs-gateway"  # in Via
CONNECT_S: Final = 5.0
ANSWER_S: Final = 300.0  # a sidecar bounds what it waits for at 120 s, unless it is set otherwise
MOST_SHOWN: Final = 2_000
MAX_FILE_BYTES: Final = 1 << 20


class Client:
    """A connection to ``url``, the sidecar's, with or without a path before ``/v1``.

    Args:
        token_file: None: no token.
        answer_s: bound on the pauses in an answer; and on connecting, which has CONNECT_S at most.
        quiet: do not warn that others may read the token.
    Attributes:
        meets_a_gateway: the last answer came through one.
    """

    def __init__(
        self, url: str, token_file: Path | None, answer_s: float = ANSWER_S, *, quiet: bool = False
    ) -> None:
        self.url, self._token_file = url, token_file
        self.meets_a_gateway = False
        headers = {"User-Agent": f"lora-fs/{__version__}"}
        if token_file is not None:
            headers[HEADER] = read_token(token_file)
            if not quiet:
                self._warn_if_overheard()
        timeout = httpx.Timeout(answer_s, connect=min(answer_s, CONNECT_S))
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout, follow_redirects=False)
        except httpx.InvalidURL as error:
            raise InputError(f"{url} is no address: {error}") from error

    def close(self) -> None:
        """End the connections."""
        self._http.close()

    def get(self, path: str) -> bytes:
        """Read ``path``; raises as ``post`` does."""
        return self._ask("GET", path)

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: list[tuple[str, str]] | None = None,
        content: Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> bytes:
        """Send JSON, or ``content`` as it comes.

        Raises:
            ServerUnavailable: nobody answers there. UnknownOutcome: the answer did not come.
            TokenRefused: it asks for a token, or for another one. What the sidecar raised.
        """
        if content is not None:
            return self._ask("POST", path, params=query, content=content, headers=headers)
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **more: Any) -> bytes:
        try:
            answer = self._http.request(method, path, **more)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ServerUnavailable(f"cannot reach {self.url}: {error}: does a sidecar run there?") from error
        except httpx.HTTPError as error:
            why = f"{self.url} did not answer: {str(error) or type(error).__name__}"
            if method == "GET":
                raise ServerUnavailable(f"{why}: ask again") from error
            raise UnknownOutcome(f"{why}: it may be done: look before you repeat it") from error
        self.meets_a_gateway = GATEWAY in answer.headers.get("via", "")
        if answer.is_success:
            return answer.content
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> LoraFsError:
        """The error that a failed answer means."""
        status, message = answer.status_code, _message(answer)
        if answer.is_redirect:
            target = shown(answer.headers.get("location", ""))
            return OperatorError(f"{self.url} redirects to {target}: name that server with --server")
        if status in (401, 403) and ERROR not in answer.headers:
            return TokenRefused(f"{self.url}: {message} ({self._shown_token()})")
        error = errors.named(answer.headers.get(ERROR, ""), message)
        if error is not None:
            return error
        if status in (404, 405):
            return OperatorError(f"{self.url} knows no such call: is it a sidecar of lora-fs {__version__}?")
        if status in (429, 502, 503, 504):
            return ServerUnavailable(f"{self.url}: {message}")
        return (
            InputError(f"{self.url}: {message}") if status < 500 else OperatorError(f"{self.url}: {message}")
        )

    def _shown_token(self) -> str:
        if self._token_file is None:
            return "no token was sent: give this command --token-file or LORA_FS_CLIENT_TOKEN_FILE"
        return f"the token of {self._token_file} was sent"

    def _warn_if_overheard(self) -> None:
        url = httpx.URL(self.url)
        if url.scheme == "http" and not _is_loopback(url.host):
            complain(
                f"the token goes to {url.host} in the clear: whoever is on the way reads it; use https://"
            )


def read_token(file: Path) -> str:
    """Read a file with one token: the first word of its only line that is no comment.

    Raises:
        InputError: it cannot be read, or holds none or several. The message holds nothing of its content.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # never waits for a FIFO
        with os.fdopen(handle, "rb") as opened:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise InputError(f"the token file {file} is no regular file")
            text = opened.read(MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise InputError(f"cannot read the token file {file}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise InputError(f"the token file {file} is no text of ASCII") from None
    lines = [line.split() for line in text.splitlines()]
    tokens = [words[0] for words in lines if words and not words[0].startswith("#")]
    if len(tokens) != 1:
        raise InputError(f"the token file {file} holds {len(tokens)} tokens: name a file with one")
    if not tokens[0].isprintable():
        raise InputError(f"the token file {file} holds a character that no header carries")
    return tokens[0]


def _message(answer: httpx.Response) -> str:
    """The text of a failed answer: our errors' message, else its body, cut."""
    with suppress(json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError):
        return str(json.loads(answer.content)["error"]["message"])
    text = " ".join(answer.text.split())[:MOST_SHOWN]
    return f"{answer.status_code} {answer.reason_phrase}" + (f": {text}" if text else "")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return f".{host.lower().rstrip('.')}".endswith(".localhost")
