"""A source's URI: its parts, and its form without secrets. Pure: no I/O.

``hf://org/repo[@revision][/folder]``, ``oci://registry/repository[:tag][@digest]``, ``s3://bucket/key``,
``gs://bucket/key``, ``http(s)://host/path``,
``file:///path``, ``pvc://claim/path``, and the schemes of installed packages. A remote one may end
in ``#sha256=…``. Userinfo and the query, where signatures stand, are never shown. Nor is what may
be either in a malformed URI. Two URIs that differ in them differ in ``Uri.identity``.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import string
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import shown

ALIASES = {"huggingface": "hf", "gcs": "gs", "s3a": "s3"}
WEB = frozenset({"http", "https"})
HOSTS = WEB | {"oci"}  # which name a host, and may name its port
NO_QUERY = frozenset({"hf", "s3", "gs", "oci"})
REMOTE = WEB | NO_QUERY | ALIASES.keys()
DEFAULT_PORTS = {"http": ":80", "https": ":443", "oci": ":443"}
LONGEST = 4_096

_ALIKE = re.compile(r"(.*?):(/+)(.*)", re.DOTALL)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*|\[([0-9A-Fa-f:.]+)\])(?::([0-9]{1,5}))?")
_PORT = re.compile(r":[^\]]*$")  # or the beginning of a password; not in an address in brackets
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")  # of a bucket, or of an organisation
_SHA256 = re.compile(r"sha256=([0-9A-Fa-f]{64})")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")  # of an oci:// source; an @ that is no password's end
_SECRET = frozenset("@:?#")  # around a user, a password or a query
_SIGNS = re.compile(r"x-(?:amz|goog)-", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")


@dataclass(frozen=True, slots=True)
class Uri:
    """A URI of a remote source. ``str()`` is the form to write and show.

    Attributes:
        scheme: lower case, aliases resolved.
        place: the host with its port, the bucket, or the organisation.
        path: the segments behind it, unchanged.
        sha256: of the file it names, from the fragment.
    """

    scheme: str
    place: str
    path: tuple[str, ...]
    sha256: str | None = None
    query: str = field(default="", repr=False)
    userinfo: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join((self.place, *self.path))}"

    @property
    def request(self) -> str:
        """The URL to request: with the query, without userinfo and fragment, in ASCII."""
        return sendable(str(self) + (f"?{self.query}" if self.query else ""))

    @property
    def identity(self) -> str:
        """Tells it from others that print the same; empty if the printed form has all.

        A hash of the query and the user. The password is not in it, nor what signs a query anew each time.
        """
        if self.scheme in NO_QUERY:
            return ""
        query = "&".join(one for one in self.query.split("&") if one and not _SIGNS.match(one))
        user = self.userinfo.partition(":")[0]
        if not query and not user:
            return ""
        return hashlib.sha256(f"{self}\n{query}\n{user}".encode(errors="surrogatepass")).hexdigest()[:32]

    def beside(self, name: str) -> Uri:
        """Another file of the same folder."""
        return Uri(self.scheme, self.place, (*self.path[:-1], name), None, self.query, self.userinfo)


def sendable(url: str, encoding: str = "utf-8") -> str:
    """Quote what no request may hold: blanks, and letters beyond ASCII."""
    return quote(url, safe=string.punctuation, encoding=encoding, errors="surrogatepass")


def is_uri(text: str) -> bool:
    """Whether it has the form ``scheme://…``; ignores blanks around it."""
    return _SCHEME.fullmatch(text.strip()) is not None


def scheme_of(text: str) -> str:
    """The scheme in lower case, aliases resolved; empty where there is none."""
    match = _SCHEME.fullmatch(text.strip())
    return ALIASES.get(match[1].lower(), match[1].lower()) if match else ""


def parse(text: str, *, redirect: bool = False) -> Uri:
    """Take a URI apart.

    Args:
        redirect: a server wrote it: an @ behind its host belongs there, as do // and %2F in its path.
    Raises:
        InputError: it is none, or could be read in more than one way.
    """
    match = _SCHEME.fullmatch(text.strip())
    if match is None or len(text) > LONGEST:
        raise InputError("the source is no URI: write scheme://place/path")
    scheme, rest = scheme_of(text), match[2]
    rest, _, fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    place, _, path = rest.partition("/")
    userinfo, _, place = place.rpartition("@")
    beyond = _DIGEST.sub("", path) if scheme == "oci" else path
    told = shown("/".join(_cut(text).split("/")[:3]))
    if scheme in NO_QUERY - {"hf"} and userinfo:
        raise InputError(f"{told}: {scheme}:// takes no user and no password: leave out what stands before @")
    if scheme in NO_QUERY - HOSTS and place and not _NAME.fullmatch(place):
        raise InputError(
            f"{told}: that is no name of a bucket or an organisation: write {scheme}://name/path"
        )
    if scheme in NO_QUERY and (re.search(r":[^:/@]*@", beyond) or (":" in userinfo and "@" in beyond)):
        raise InputError(f"{told}: there is a : before an @, as in a password: leave both out")
    if "@" in beyond + query + fragment and not redirect and (scheme in HOSTS or _PORT.search(place)):
        raise InputError(
            f"{told}: it can be read as a password with a /, ? or # in it: write it as %2F, %3F or %23; "
            "and an @ that belongs to the path or the query as %40"
        )
    if scheme in HOSTS:
        place = place.lower().removesuffix(DEFAULT_PORTS[scheme])
    if fragment and not (digest := _SHA256.fullmatch(fragment)):
        raise InputError(f"{told}: what stands behind # is no #sha256= with 64 hex digits")
    if query and scheme in NO_QUERY:
        raise InputError(f"{told}: {scheme}:// takes no query: leave out what stands behind ?")
    if scheme in HOSTS and place:
        _check_host(scheme, place, told)
    if not place.strip():
        raise InputError(f"{told} names no place: write {scheme}://place/path")
    if scheme not in WEB or not path.strip("/"):
        path = path.rstrip("/")
    segments = tuple(path.split("/")) if path else ()
    for segment in (place, *segments[:-1], *filter(None, segments[-1:])):
        plain = unquote(segment)
        parts = {*plain.split("/"), *unquote(plain).split("/")}
        bare = {part.partition(";")[0] for part in parts}  # Java's servers drop what is behind a ;
        if bare & {".", ".."} or ("" in parts and not redirect):
            raise InputError(f"{told}: its path has an empty part, . or ..: write it out")
        if _CONTROL.search(plain) or (scheme in HOSTS and " " in segment):
            raise InputError(f"{told}: its path has a blank, a backslash or a control character in it")
        if "/" in plain and scheme != "hf" and not redirect:  # a revision may be refs%2Fpr%2F1
            raise InputError(f"{told}: its path has %2F in it: write it out")
    return Uri(scheme, place, segments, digest[1].lower() if fragment and digest else None, query, userinfo)


def _check_host(scheme: str, place: str, told: str) -> None:
    match = _HOST.fullmatch(place)
    try:
        valid = match is not None and (match[1] is None or bool(ipaddress.IPv6Address(match[1])))
    except ValueError:
        valid = False
    if match is None or not valid:
        raise InputError(f"{told}: that is no host: write {scheme}://host/path or {scheme}://host:port/path")
    if match[2] and not 0 < int(match[2]) < 1 << 16:  # a connection to 99999 goes to 34463
        raise InputError(f"{told}: {match[2]} is no port: write one from 1 to 65535")


def redacted(text: str) -> str:
    """A source in the form to write and show, also if it does not parse.

    Keeps what stands behind the last ``@`` and before the first ``?`` and ``#``, wherever they are: an
    unquoted password may hold a ``/`` and any of these.
    """
    if scheme_of(text) in NO_QUERY:
        try:
            return str(parse(text))  # with the @ of a revision, or of an object's name
        except InputError:
            pass
    return _cut(text)


def _cut(text: str) -> str:
    match = _ALIKE.fullmatch(text.strip())
    if match is None:
        return text
    head, slashes, rest = match.groups()
    scheme = scheme_of(text) or (head if _SECRET.isdisjoint(head) else "…")
    remote = slashes == "//" or scheme.lower() in REMOTE
    start, end = rest.rfind("@") + 1, len(re.split(r"[?#]", rest, maxsplit=1)[0])
    if not remote and ":" not in rest[:start] and start <= end:
        start = 0  # a path of this machine, or a name for the downloader
    place, slash, path = rest[start:end].partition("/")
    told = f"{place}{slash}{path}"
    if remote and ":" in place and (scheme in NO_QUERY - HOSTS or not _HOST.fullmatch(place)):
        told = ""
    return f"{scheme}:{slashes}{'…' if '/' in rest[:start] or (rest and not told) else ''}{told}"
