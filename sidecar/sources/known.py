"""Which source a text names: our own, those that installed packages add, and a downloader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.escaping import shown
from lora_fs.sidecar.sources.offer import Offer, Options, Source
from lora_fs.sidecar.sources.remote.bucket import Bucket
from lora_fs.sidecar.sources.remote.downloader import Downloader, downloaded
from lora_fs.sidecar.sources.remote.hub import Hub
from lora_fs.sidecar.sources.remote.oci.source import Oci
from lora_fs.sidecar.sources.remote.web import Web
from lora_fs.sidecar.sources.uri import Uri, is_uri, parse, scheme_of

GROUP = "lora_fs.sources"
LOCAL = frozenset({"file", "pvc"})
BUILT_IN: dict[str, Callable[[Uri, Options], Source]] = {
    "hf": Hub,
    "oci": Oci,
    "s3": Bucket,
    "gs": Bucket,
    "http": Web,
    "https": Web,
}


def is_remote(text: str, plugin: str | None = None) -> bool:
    """Whether it needs a fetch: a URI that names no folder here, or a name for the downloader."""
    return scheme_of(text) not in LOCAL if is_uri(text) else plugin is not None


@contextmanager
def opened(text: str, options: Options, plugin: str | None = None) -> Iterator[Source]:
    """The source that ``text`` names, closed at the end.

    Args:
        plugin: the downloader's class, for what is no URI of a known scheme.
    Raises:
        InputError: no source has this scheme, or the settings forbid it.
    """
    source = _open(text, options, plugin)
    try:
        yield _Marked(source, text)
    finally:
        source.close()


class _Marked:
    """A source whose offers tell it from others that print the same."""

    def __init__(self, source: Source, text: str) -> None:
        self._source, self._text = source, text

    def look(self) -> Offer:
        offer = self._source.look()
        try:
            return offer.marked(parse(self._text))
        except InputError:  # a name for the downloader
            return offer

    def close(self) -> None:
        self._source.close()


def _open(text: str, options: Options, plugin: str | None) -> Source:
    scheme = scheme_of(text)
    added = {point.name: point for point in metadata.entry_points(group=GROUP)}
    factory: Callable[[Uri, Options], Source] | None = BUILT_IN.get(scheme)
    if factory is None and scheme in added:
        factory = added[scheme].load()
    if factory is None:
        if plugin is not None:
            options.check(downloaded(text))
            return Downloader(text, plugin)
        known = ", ".join(f"{name}://" for name in sorted({*BUILT_IN, *LOCAL, *added}))
        raise InputError(f"{shown(scheme)}:// is no source that is known here: {known}")
    uri = parse(text)
    options.check(uri)
    return factory(uri, options)
