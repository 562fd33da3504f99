"""``hf://org/repo[@revision][/folder]``: the Hugging Face Hub, or the one that HF_ENDPOINT names.

The hub says which commit a revision is, and which files it has; the pin is that commit.
The token of huggingface_hub (HF_TOKEN, or that of its login) goes to the hub and not to where the hub
redirects. ``web`` asks and reads. huggingface_hub's own client follows redirects to any address, and takes
answers of any size. It asks the hub also for other things, and begins a download anew after a kill.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated
from urllib.parse import quote, unquote, urlsplit

from pydantic import BaseModel, Field, ValidationError

from lora_fs.sidecar.errors import InputError, LoraFsError, NotFound, SourceUnavailable
from lora_fs.sidecar.sources.offer import Offer, Options, Piece, is_adapter, put_off, wanted
from lora_fs.sidecar.sources.remote.web import BUSY, Answer, Http
from lora_fs.sidecar.sources.uri import Uri, parse

MOST_LISTED_BYTES = 8 << 20  # of a commit's list: some 30,000 files. Parsed, it takes up to 40 times as much
_REFUSED = "Invalid credentials in Authorization header"  # a 401 that says less hides a repository

Refusal = Callable[[Uri, Answer], LoraFsError | None]


class _Lfs(BaseModel):
    sha256: str


class _Listed(BaseModel):
    """A file of a commit. ``blobId``: git's hash of it."""

    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None
    blobId: str | None = None

    @property
    def size_bytes(self) -> int | None:
        """The size by the hub's word; None if that is no size."""
        return self.size if self.size is not None and self.size >= 0 else None


class _Commit(BaseModel):
    sha: Annotated[str, Field(pattern=r"^[0-9A-Za-z._-]{1,128}$")]
    siblings: list[_Listed] | None = None


class Hub:
    """One folder of one commit."""

    def __init__(self, uri: Uri, options: Options) -> None:
        self._uri, self._options = uri, options
        self._repo, self._revision, self._folder = _parts(uri)

    def look(self) -> Offer:
        from huggingface_hub import constants, hf_hub_url

        token = _token()
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        # The hub redirects to wherever it keeps large files, under names that nobody can list: so any public
        # address is fine. Where HF_ENDPOINT leads is the operator's to say.
        hub = parse(constants.ENDPOINT)

        def check_address(to: Uri, address: str) -> None:
            if (to.scheme, to.place) != (hub.scheme, hub.place):
                self._options.check_address(to, address)

        options = replace(self._options, check=lambda _: None, check_address=check_address)
        commit = self._commit(options, headers)
        files = {one.rfilename: one for one in commit.siblings or ()}
        inside = {
            posixpath.basename(path): one.size_bytes
            for path, one in files.items()
            if posixpath.dirname(path) == self._folder
        }
        try:
            names = wanted(inside, _below(self._folder, files))
        except InputError as error:
            raise InputError(f"{self._uri}: {error}") from error
        pieces = []
        for name in names:
            file = files[posixpath.join(self._folder, name)]
            size, sha256 = file.size_bytes, file.lfs.sha256 if file.lfs else None
            url = hf_hub_url(
                self._repo,
                name,
                subfolder=self._folder or None,
                revision=commit.sha,
                endpoint=constants.ENDPOINT,
            )
            asked = _Asked(partial(self._no_file, name), options, headers)
            known = None if sha256 or size is None else file.blobId  # a git hash begins with the size
            pieces.append(Piece(name, size, asked.reader(parse(url), size), size is not None, sha256, known))
        return Offer(str(self._uri), commit.sha, tuple(pieces))

    def close(self) -> None:
        """Nothing is held."""

    def _commit(self, options: Options, headers: Mapping[str, str]) -> _Commit:
        """Ask the hub which commit the revision is, and for its files."""
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        try:
            validate_repo_id(self._repo)
        except ValueError as error:
            raise InputError(f"{self._uri}: {' '.join(str(error).split())[:200]}") from error
        if constants.HF_HUB_OFFLINE:
            raise InputError(f"{self._uri}: HF_HUB_OFFLINE is set: the hub is not asked")
        where = f"{constants.ENDPOINT}/api/models/{self._repo}"
        if self._revision:
            where += f"/revision/{quote(self._revision, safe='')}"
        asked = _Asked(self._no_commit, options, headers)
        with asked.get(parse(f"{where}?blobs=true", redirect=True), {}) as answer:
            data = asked.whole(self._uri, answer, MOST_LISTED_BYTES)
        try:
            return _Commit.model_validate_json(data)
        except ValidationError as error:
            raise SourceUnavailable(
                f"{self._uri}: {_host(constants.ENDPOINT)} did not answer as a hub: is HF_ENDPOINT right?"
            ) from error

    def _no_commit(self, uri: Uri, answer: Answer) -> LoraFsError | None:
        status, code = answer.status, answer.headers.get("X-Error-Code")
        said = answer.headers.get("X-Error-Message")
        if code == "GatedRepo":
            return self._gated()
        if code == "RevisionNotFound":
            which = f"revision {self._revision!a}" if self._revision else "main branch"
            return NotFound(f"{self._uri}: the repository has no {which}")
        if said == "Access to this resource is disabled.":
            return InputError(f"{self._uri}: the hub has disabled this repository")
        if code == "RepoNotFound" or (status == 401 and said != _REFUSED):
            return NotFound(f"{self._uri}: the hub has no such repository, or it is private: set HF_TOKEN")
        if status in (401, 403):
            told = f"the hub refuses {_asker()} ({status})"
            return InputError(f"{self._uri}: {told}: set HF_TOKEN to one that may read it")
        if status != 200:
            when = answer.headers.get("Retry-After") if status in BUSY else None
            return put_off(SourceUnavailable(f"{self._uri}: the hub answered {status}"), when)
        return None

    def _no_file(self, name: str, uri: Uri, answer: Answer) -> LoraFsError | None:
        status, told = answer.status, f"{self._uri}: {name}"
        if answer.headers.get("X-Error-Code") == "GatedRepo":
            return self._gated()
        if status in (404, 410):
            return NotFound(f"{told}: the hub has no such file ({status})")
        if status in (401, 403):
            by_hub = urlsplit(answer.url).netloc.lower() == uri.place.lower()
            return InputError(
                f"{told} may not be read with {_asker()} ({status}): set HF_TOKEN to one that may"
                if by_hub
                else f"{told}: {_host(answer.url)}, where the hub sends for it, refuses it ({status})"
            )
        return None

    def _gated(self) -> InputError:
        return InputError(
            f"{self._uri} is gated: accept its terms on the hub, and set HF_TOKEN to a token of who did"
        )


class _Asked(Http):
    """Raises what ``refusal`` makes of an answer, unless that is None."""

    def __init__(self, refusal: Refusal, options: Options, headers: Mapping[str, str]) -> None:
        super().__init__(options, headers)
        self._refusal = refusal

    def _check(self, uri: Uri, answer: Answer) -> None:
        if (refusal := self._refusal(uri, answer)) is not None:
            raise refusal
        super()._check(uri, answer)


def _below(folder: str, paths: Iterable[str]) -> list[str]:
    """The folders below ``folder`` that hold an adapter, as their paths below it."""
    held: dict[str, set[str]] = {}
    for path in paths:
        held.setdefault(posixpath.dirname(path), set()).add(posixpath.basename(path))
    start = f"{folder}/" if folder else ""
    found = [at for at, names in held.items() if at and at.startswith(start) and is_adapter(names)]
    return [at.removeprefix(start) for at in found]


def _token() -> str | None:
    """The token for the hub, unless HF_HUB_DISABLE_IMPLICIT_TOKEN keeps it back."""
    from huggingface_hub import constants, get_token

    return None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()


def _asker() -> str:
    return "this token" if _token() else "a request without a token"


def _host(url: str) -> str:
    """The server's name, without what may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _parts(uri: Uri) -> tuple[str, str | None, str]:
    """The repository, the revision, and the folder in it."""
    if not uri.path:
        raise InputError(f"{uri}: write hf://org/repo, hf://org/repo@revision or hf://org/repo/folder")
    if uri.sha256:
        raise InputError(f"{uri}: the hub says what the files have to be: leave #sha256= out")
    name, _, revision = uri.path[0].partition("@")
    rest = list(uri.path[1:])
    if revision == "refs" and len(rest) >= 2:  # refs/pr/1, a revision with slashes
        revision, rest = "/".join((revision, *rest[:2])), rest[2:]
    return f"{uri.place}/{name}", unquote(revision) or None, "/".join(rest)
