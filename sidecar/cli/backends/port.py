"""What commands ask of a registry. They do not know where it is.

``volume.OnVolume`` answers from a folder, ``http.OverHttp`` from a sidecar that has the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lora_fs.sidecar.model import Pointer, Record, Scope
    from lora_fs.sidecar.registry.lifecycle.acts import Act, Done
    from lora_fs.sidecar.registry.lifecycle.register_as import Outcome, RegisterAs
    from lora_fs.sidecar.registry.store.evaluations import Evaluations
    from lora_fs.sidecar.registry.view.reports import Happened, Reports
    from lora_fs.sidecar.registry.view.snapshot import Desired
    from lora_fs.sidecar.server.bodies import FleetBody


@dataclass(frozen=True, slots=True)
class Named:
    """The pointer of a name, None if it never served, and its registered revisions with their evaluations."""

    pointer: Pointer | None
    revisions: tuple[Record, ...]
    evaluations: Evaluations


class Backend(Protocol):
    """A registry. Every call may raise what a volume that does not answer does."""

    @property
    def place(self) -> str:
        """The folder or the URL, for people."""

    def scope(self) -> Scope:
        """Return the namespace and the base model of this run."""

    def scopes(self) -> tuple[Scope, ...]:
        """List every scope there is, as far as this run may see."""

    def desired(self, scopes: Sequence[Scope], name: str | None = None) -> Desired:
        """Read the registered adapters of scopes; ``problems`` names what is unreadable.

        Args:
            name: this one has to be there, with its problems; others need not.
        """

    def names(self, scope: Scope, beginning: str) -> Iterable[str]:
        """List registered names that begin so, some twice, for a shell. An unreadable one is among them."""

    def named(self, scope: Scope, name: str) -> Named:
        """Read one name afresh."""

    def reports(self) -> Reports:
        """Read what replicas report."""

    def happened(self) -> Happened:
        """Read what happened on replicas lately."""

    def fleet(self, name: str | None) -> FleetBody | None:
        """Read a gateway's view of its replicas; None: the server is no gateway.

        Args:
            name: read this adapter's order of the replicas, too. With its namespace if there are several.
        """

    def do(self, scope: Scope, name: str, act: Act) -> Done:
        """Do an act to a name; raises what ``act.do`` does."""

    def register(
        self, scope: Scope, name: str, source: str, said: RegisterAs, *, link: bool, plugin: str | None
    ) -> Outcome:
        """Register what lies in ``source``.

        Args:
            link: refer to the folder where it is. plugin: the class that downloads ``source``.
        """
