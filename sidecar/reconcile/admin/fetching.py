"""Register from a source that is not here: look, fetch once per volume, validate, register.

Used by the command line and by a replica; what each may ask for, and how it tells how far it is, they say.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from lora_fs.sidecar.model import AdapterKey, Scope, check_segment
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.fetch_cache import fetched
from lora_fs.sidecar.registry.lifecycle.ingest import Registered, Registration
from lora_fs.sidecar.registry.lifecycle.release import present_revisions, refuse_served
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.sources.known import opened
from lora_fs.sidecar.sources.offer import Meter, Offer, Options
from lora_fs.sidecar.sources.receive.fetch import bring
from lora_fs.sidecar.sources.uri import redacted
from lora_fs.sidecar.validate import Expectation

FETCHING, WAITING, CHECKING = "fetching", "another process fetches it", "checking"

Tell = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Fetching:
    """How to fetch.

    Attributes:
        most_bytes, most_s: bounds on one fetch.
        plugin: the downloader's class; None: there is none.
        tell: called with the step, the bytes so far, and all bytes, None if unknown.
        stop: called now and then; True ends the fetch, and a later one can resume it.
    """

    options: Options
    most_bytes: int
    most_s: float
    plugin: str | None = None
    tell: Tell = field(default=lambda step, received, total: None, repr=False)
    stop: Callable[[], bool] = lambda: False

    @classmethod
    def by(cls, settings: Settings, options: Options | None = None) -> Fetching:
        """Make one by the settings."""
        return cls(
            replace(
                options or Options(),
                netrc_file=settings.netrc_file,
                registry_auth_file=settings.registry_auth_file,
            ),
            settings.fetch_max_bytes,
            settings.fetch_timeout_s,
            settings.lora_downloader_plugin,
        )

    def meter(self) -> Meter:
        """Bounds one fetch, from now on."""
        return Meter(self.most_bytes, self.most_s, lambda at, of: self.tell(FETCHING, at, of), self.stop)

    def timed(self, source: str, meter: Meter) -> Options:
        """The options. Their connections end when the meter's time is over, or somebody stops it."""
        return replace(self.options, alive=lambda: meter.check_time(redacted(source)))


def register(
    registry: Registry,
    scope: Scope,
    wanted: Registration,
    source: str,
    expectation: Expectation,
    fetching: Fetching,
    *,
    writer: str,
    dry_run: bool = False,
) -> Registered:
    """Register what ``source`` names; ignores the source and uri of ``wanted``.

    Args:
        dry_run: fetch to this machine's own temporary folder; say what it would register.
    Raises:
        See ``registration.register``, ``sources.offer.Source`` and ``sources.transfer.fetch``.
    """
    check_segment("name", wanted.name)
    if dry_run:
        with brought(source, fetching) as (folder, offer):
            ready = replace(wanted, source=folder, uri=offer.uri, pin=offer.recorded)
            return ingest.register(registry, scope, ready, expectation, writer=writer, dry_run=True)
    existing = present_revisions(registry, scope, wanted.name)
    if wanted.must_be_new:
        refuse_served(registry, scope, wanted.name)
    meter = fetching.meter()
    with opened(source, fetching.timed(source, meter), fetching.plugin) as one:
        offer = one.look()

        def fetch(folder: Path) -> tuple[Path, dict[str, str]]:
            if not existing:  # of a name that is there the bytes may be, too: then nothing grows
                key = AdapterKey(*scope, wanted.revision or "v1", wanted.name)
                registry.accounts.check(key, offer.size_bytes or 0)
            return bring(offer, folder, meter)

        def waiting(there: int) -> None:
            fetching.tell(WAITING, there, offer.size_bytes)
            meter.check_time(offer.uri)

        with fetched(
            registry, scope, offer.uri, offer.pin, fetch, wait_s=fetching.most_s, waiting=waiting
        ) as got:
            size = offer.size_bytes or 0
            fetching.tell(CHECKING, size, offer.size_bytes)
            ready = replace(wanted, source=got.folder, uri=offer.uri, pin=offer.recorded)
            ready = replace(ready, takes=got.fresh, hashes=got.hashes)
            done = ingest.register(registry, scope, ready, expectation, writer=writer)
            got.record = done.record
            return replace(done, restored=True) if done.record.key == got.mended else done


@contextmanager
def brought(source: str, fetching: Fetching) -> Iterator[tuple[Path, Offer]]:
    """The adapter of a source in a folder of this machine, which is gone afterwards: to look at it."""
    meter = fetching.meter()
    with (
        opened(source, fetching.timed(source, meter), fetching.plugin) as one,
        tempfile.TemporaryDirectory(prefix="lora-fs-") as folder,
    ):
        offer = one.look()
        yield bring(offer, Path(folder), meter)[0], offer
