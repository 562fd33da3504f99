"""``hf://org/repo[@revision][/folder]``: the Hugging Face Hub, or the one that HF_ENDPOINT names.

huggingface_hub's client finds the revision's commit and its files; the pin is that commit.
Its token (HF_TOKEN, or that of its login) goes to the hub and not to where the hub redirects.
``web`` reads the bytes, since the client's own downloads begin anew after a kill.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import unquote, urlsplit

from lora_fs.sidecar.errors import InputError, NotFound, SourceUnavailable
from lora_fs.sidecar.sources.offer import Offer, Options, Piece, is_adapter, put_off, wanted
from lora_fs.sidecar.sources.remote.connection import waited
from lora_fs.sidecar.sources.remote.web import BUSY, Answer, Http
from lora_fs.sidecar.sources.uri import Uri, parse


class Hub:
    """One folder of one commit."""

    def __init__(self, uri: Uri, options: Options) -> None:
        self._uri, self._options = uri, options
        self._repo, self._revision, self._folder = _parts(uri)

    def look(self) -> Offer:
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        commit, files = self._files()
        inside = {
            posixpath.basename(path): size
            for path, (size, _, _) in files.items()
            if posixpath.dirname(path) == self._folder
        }
        try:
            names = wanted(inside, _below(self._folder, files))
        except InputError as error:
            raise InputError(f"{self._uri}: {error}") from error
        headers = build_hf_headers(library_name="lora-fs")
        # The hub redirects to wherever it keeps large files, under names that nobody can list: so any public
        # address is fine. Where HF_ENDPOINT leads is the operator's to say.
        hub = parse(constants.ENDPOINT)

        def check_address(to: Uri, address: str) -> None:
            if (to.scheme, to.place) != (hub.scheme, hub.place):
                self._options.check_address(to, address)

        options = replace(self._options, check=lambda _: None, check_address=check_address)
        pieces = []
        for name in names:
            size, sha256, oid = files[posixpath.join(self._folder, name)]
            url = hf_hub_url(
                self._repo, name, subfolder=self._folder or None, revision=commit, endpoint=constants.ENDPOINT
            )
            read = _File(f"{self._uri}: {name}", self._gated, options, headers).reader(parse(url), size)
            known = None if sha256 or size is None else oid  # a git hash begins with the size
            pieces.append(Piece(name, size, read, size is not None, sha256, known))
        return Offer(str(self._uri), commit, tuple(pieces))

    def close(self) -> None:
        """Nothing is held."""

    def _files(
        self, *, again: bool = True
    ) -> tuple[str, dict[str, tuple[int | None, str | None, str | None]]]:
        """The commit, and of each file of the repository its size, its SHA-256 or its git id.

        Args:
            again: ask once more where no answer came: of a kept connection that the hub has closed none does.
        """
        from huggingface_hub import HfApi, constants, errors

        try:
            ask = partial(HfApi(library_name="lora-fs").model_info, self._repo, revision=self._revision)
            ask = partial(ask, files_metadata=True, timeout=self._options.stall_s)
            info = waited(ask, self._options.alive)
        except SourceUnavailable:  # the time for it is over
            raise
        except errors.GatedRepoError as error:
            raise self._gated() from error
        except errors.RepositoryNotFoundError as error:
            raise NotFound(
                f"{self._uri}: the hub has no such repository, or it is private: set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            which = f"revision {self._revision!a}" if self._revision else "main branch"
            raise NotFound(f"{self._uri}: the repository has no {which}") from error
        except errors.DisabledRepoError as error:
            raise InputError(f"{self._uri}: the hub has disabled this repository") from error
        except errors.OfflineModeIsEnabled as error:
            raise InputError(f"{self._uri}: HF_HUB_OFFLINE is set: the hub is not asked") from error
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
            raise SourceUnavailable(
                f"{self._uri}: {_host(constants.ENDPOINT)} did not answer as a hub: is HF_ENDPOINT right?"
            ) from error
        except ValueError as error:
            raise InputError(f"{self._uri}: {' '.join(str(error).split())[:200]}") from error
        except Exception as error:  # the client's HTTP library has errors of its own
            answer = getattr(error, "response", None)
            status = getattr(answer, "status_code", None)
            if status is None and again:
                return self._files(again=False)
            if status in (401, 403):
                told = f"the hub refuses {_token()} ({status})"
                raise InputError(f"{self._uri}: {told}: set HF_TOKEN to one that may read it") from error
            told = f"answered {status}" if status else f"does not answer ({type(error).__name__})"
            when = answer.headers.get("Retry-After") if answer is not None and status in BUSY else None
            raise put_off(SourceUnavailable(f"{self._uri}: the hub {told}"), when) from error
        if not info.sha:
            raise SourceUnavailable(f"{self._uri}: the hub did not say which commit it is")
        files = {
            one.rfilename: (_size(one.size), one.lfs.sha256 if one.lfs else None, one.blob_id)
            for one in info.siblings or ()
        }
        return info.sha, files

    def _gated(self) -> InputError:
        return InputError(
            f"{self._uri} is gated: accept its terms on the hub, and set HF_TOKEN to a token of who did"
        )


class _File(Http):
    """Reads one file; an error names what the hub answered instead."""

    def __init__(
        self, told: str, gated: Callable[[], InputError], options: Options, headers: Mapping[str, str]
    ) -> None:
        """``told`` names the file; ``gated`` makes the error if the hub refuses it."""
        super().__init__(options, headers)
        self._told, self._gated = told, gated

    def _check(self, uri: Uri, answer: Answer) -> None:
        status = answer.status
        if answer.headers.get("X-Error-Code") == "GatedRepo":
            raise self._gated()
        if status in (404, 410):
            raise NotFound(f"{self._told}: the hub has no such file ({status})")
        if status in (401, 403):
            by_hub = urlsplit(answer.url).netloc.lower() == uri.place.lower()
            raise InputError(
                f"{self._told} may not be read with {_token()} ({status}): set HF_TOKEN to one that may"
                if by_hub
                else f"{self._told}: {_host(answer.url)}, where the hub sends for it, refuses it ({status})"
            )
        super()._check(uri, answer)


def _below(folder: str, paths: Iterable[str]) -> list[str]:
    """The folders below ``folder`` that hold an adapter, as their paths below it."""
    held: dict[str, set[str]] = {}
    for path in paths:
        held.setdefault(posixpath.dirname(path), set()).add(posixpath.basename(path))
    start = f"{folder}/" if folder else ""
    found = [at for at, names in held.items() if at and at.startswith(start) and is_adapter(names)]
    return [at.removeprefix(start) for at in found]


def _size(said: object) -> int | None:
    """The size of a file by the hub's word; None if that is no size."""
    return said if isinstance(said, int) and said >= 0 else None


def _token() -> str:
    from huggingface_hub import get_token

    return "this token" if get_token() else "a request without a token"


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
