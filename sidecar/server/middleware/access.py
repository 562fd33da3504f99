"""Who may register, unregister and read: the tokens of the token file, and what needs none.

Without a token file nobody registers and unregisters over HTTP, unless the replica is ``insecure``: then
callers on this machine may, or all. Reading is open in the public namespaces; in others it takes a token. A
token adds to what is public and takes nothing away. The file is read at each admin call, and for reading at
most ``FRESH_S`` old, so a rotation needs no restart. A broken file lets nobody in, and is a condition from
the start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastapi import HTTPException, Request
from starlette.datastructures import Headers
from starlette.types import Scope

from lora_fs.sidecar.concurrency import Threads
from lora_fs.sidecar.logs import event
from lora_fs.sidecar.model import ChangedBy
from lora_fs.sidecar.server.middleware.loopback import is_from_here
from lora_fs.sidecar.server.middleware.origin import Sites
from lora_fs.sidecar.server.middleware.tokens import (
    BadTokenFile,
    Token,
    TokenFile,
    Verb,
    digest_of,
    find,
)
from lora_fs.sidecar.settings import Insecure

logger = logging.getLogger(__name__)

HEADER: Final = "x-lora-fs-token"  # where Authorization carries the engine's own key
FRESH_S: Final = 1.0
READ_WAIT_S: Final = 5.0
AT_ONCE: Final = 4
LOOK_S: Final = 10.0  # between looks at the file that nobody asked for
EVERY: Final = "*"
NOBODY: Final = "-"
NO_TOKENS: Final = (
    "this replica has no token file, and answers no call that changes adapters: start the sidecar with "
    "--token-file or LORA_FS_TOKEN_FILE, or use the command line on the volume; a development machine "
    "may start it with --insecure (LORA_FS_INSECURE=1)"
)
FROM_AFAR: Final = (
    "this replica runs with --insecure: only callers on its own machine, with no proxy between, may change "
    "adapters; to let others, start the sidecar with --token-file or LORA_FS_TOKEN_FILE"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of an admin call. ``token`` is the token's name, None if the call needs none."""

    token: str | None
    address: str

    @property
    def writer(self) -> str:
        """For the record: ``http:10.0.0.7``, with a token's name ``http:ci@10.0.0.7``."""
        return f"http:{self.token}@{self.address}" if self.token is not None else f"http:{self.address}"


class NotPermitted(HTTPException):
    """403: the caller is known, and may not do this."""

    def __init__(self, message: str, caller: Caller) -> None:
        super().__init__(403, message)
        self.caller = caller


@dataclass(frozen=True, slots=True)
class Sight:
    """The namespaces a caller may list and use. ``namespaces`` None: all that the replica serves."""

    namespaces: frozenset[str] | None = None

    def __bool__(self) -> bool:
        return self.namespaces is None or bool(self.namespaces)

    def __contains__(self, namespace: object) -> bool:
        return self.namespaces is None or namespace in self.namespaces


ALL: Final = Sight()


class Admin:
    """Tell who may do what.

    Args:
        token_file: None: nobody may register, or who ``insecure`` and ``keys`` let. public: namespaces that
            are read without a token.
        hosts: see ``Sites``.
        insecure: see ``Settings.insecure`` and ``is_from_here``.
    Attributes:
        keys: the SHA-256 of keys that, without a token file, let their holder register: those that the server
            around this asks for itself.
    """

    def __init__(
        self,
        token_file: Path | None,
        public: tuple[str, ...] = (EVERY,),
        clock: Callable[[], float] = time.monotonic,
        hosts: Iterable[str] = (),
        insecure: Insecure = "off",
    ) -> None:
        self._sites, self._insecure = Sites(hosts), insecure
        self.keys: frozenset[bytes] = frozenset()
        self._token_file, self._clock = None if token_file is None else TokenFile(token_file), clock
        self._public = None if EVERY in public else frozenset(public) - {NOBODY}
        self._read_at: float | None = None
        self._failed_at: float | None = None
        self._tokens: Mapping[bytes, Token] = {}
        self._problem: str | None = None
        self._threads = Threads(AT_ONCE)

    def conditions(self) -> tuple[str, ...]:
        """The fault of the token file at the last read, without any of its contents."""
        if self._problem is None or self._token_file is None:
            return ()
        return (f"AdminToken: {self._token_file.path}: {self._problem}; what needs a token is answered 503",)

    @property
    def changed_by(self) -> ChangedBy:
        """Who changes adapters over HTTP."""
        if self._token_file is not None:
            return "tokens"
        if self.keys:
            return "key"
        return "nobody" if self._insecure == "off" else self._insecure

    def announce(self) -> None:
        """Log once who may register where no token file says it."""
        if self.changed_by == "nobody":
            told = event("admin.closed")
            logger.info("no token file: calls over HTTP that change adapters are refused", extra=told)
        elif self.changed_by in ("loopback", "any"):
            who = "all who reach the port" if self.changed_by == "any" else "callers on this machine"
            told = event("admin.insecure", insecure=self.changed_by)
            logger.warning("--insecure: %s change adapters without a token", who, extra=told)

    async def look(self) -> None:
        """Read the token file, so that its faults show before the first call. Bounded."""
        if self._token_file is not None:
            with suppress(HTTPException):
                await self._read()

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look at the token file every ``LOOK_S`` inside the block."""

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await self.look()

        task = asyncio.create_task(watch(), name="token file")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def admit(self, request: Request, verb: Verb, namespace: str | None) -> Caller:
        """Who makes an admin call.

        Args:
            namespace: where it acts; None if it names none of this replica's, which is refused later.
        Raises:
            HTTPException: 401 without a good token; 403 if it is not good for this, or if another site's page
                asks; 403 if the caller needs a token and there is no file; 503 if it cannot be read.
        """
        address = address_of(request.scope)
        if verb is not Verb.READ:
            if self._token_file is None:
                self._check_without_tokens(request.headers, address)
            self._sites.check(request.headers, needs_token=self._token_file is not None or bool(self.keys))
        if self._token_file is None:
            return Caller(None, address)
        given = given_token(request.headers)
        token = find(await self._read(), given) if given is not None else None
        if token is None:
            raise HTTPException(
                401, "this call needs a token of the token file", headers={"WWW-Authenticate": "Bearer"}
            )
        if verb not in token.verbs or (namespace is not None and not token.may(verb, namespace)):
            where = f" in namespace {namespace}" if namespace is not None else ""
            raise NotPermitted(
                f"the token {token.name} may not {verb.value}{where}", Caller(token.name, address)
            )
        return Caller(token.name, address)

    def _check_without_tokens(self, headers: Headers, address: str) -> None:
        changed_by = self.changed_by
        if changed_by == "key":
            shown = bearer(headers.get("authorization", ""))
            if shown is None or digest_of(shown) not in self.keys:
                raise HTTPException(
                    401,
                    "this call needs the engine's key (--api-key)",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        elif changed_by == "nobody":
            raise HTTPException(403, NO_TOKENS)
        elif changed_by == "loopback" and not is_from_here(address, headers):
            raise HTTPException(403, FROM_AFAR)

    async def sight(self, headers: Headers) -> Sight:
        """Return the namespaces that a request may read.

        Raises:
            HTTPException: 401 for a token in ``X-Lora-Fs-Token`` that is none, 503 if the file
                cannot be read. An Authorization that is no token of ours may be the engine's.
        """
        if self._public is None:
            return ALL
        given = given_token(headers)
        if given is None or self._token_file is None:
            return Sight(self._public)
        token = find(await self._read(FRESH_S), given)
        if token is None and HEADER in headers:
            raise HTTPException(401, "the token is none of the token file")
        if token is None or Verb.READ not in token.verbs:
            return Sight(self._public)
        return ALL if token.namespaces is None else Sight(self._public | token.namespaces)

    async def knows(self, headers: Headers) -> bool:
        """Whether a request shows a token of the file.

        Raises:
            HTTPException: 503 if the file cannot be read.
        """
        given = given_token(headers)
        if given is None or self._token_file is None:
            return False
        return find(await self._read(FRESH_S), given) is not None

    def _is_recent(self, at: float | None, within_s: float) -> bool:
        return at is not None and self._clock() - at < within_s

    async def _read(self, fresh_s: float = 0.0) -> Mapping[bytes, Token]:
        """The tokens, at most ``fresh_s`` old; and so is a failure."""
        if self._is_recent(self._read_at, fresh_s):
            return self._tokens
        if self._problem is not None and self._is_recent(self._failed_at, fresh_s):
            raise HTTPException(503, self._problem)
        assert self._token_file is not None
        now = self._clock()
        try:
            tokens = await self._read_in_time(self._token_file)
        except HTTPException as error:
            self._failed_at, self._problem = self._clock(), error.detail
            raise
        self._tokens = tokens
        self._read_at, self._failed_at, self._problem = now, None, None
        return tokens

    async def _read_in_time(self, file: TokenFile) -> Mapping[bytes, Token]:
        try:
            return await self._threads.run(file.read, READ_WAIT_S)
        except TimeoutError as error:
            raise HTTPException(503, f"the token file was not read in {READ_WAIT_S:.0f} s") from error
        except OSError as error:
            raise HTTPException(503, f"the token file cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError:
            raise HTTPException(503, "the token file is not text") from None
        except BadTokenFile as error:
            raise HTTPException(503, f"the token file is not valid: {error}") from error


def address_of(scope: Scope) -> str:
    """The client's address by the connection. Believes no header."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def given_token(headers: Headers) -> str | None:
    """The token of a request: ``X-Lora-Fs-Token``, else the bearer of ``Authorization``; None: neither."""
    own = headers.get(HEADER)
    return own.strip() if own is not None else bearer(headers.get("authorization", ""))


def bearer(authorization: str) -> str | None:
    """The credentials of an ``Authorization`` header of the scheme Bearer; None of any other."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None
