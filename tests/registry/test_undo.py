"""Loads of one name that are taken back, in any order: what was there before is there afterwards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry.lifecycle import amend, ingest, release
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.lifecycle.undo import Made, take_back
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
TRAINER = "http:trainer@10.0.0.1"  # at two gateways of one machine a trainer is one writer


@dataclass
class Site:
    """A registry in which ``a`` serves v1, the bytes of seed 1."""

    registry: Registry
    folder: Path

    name: str = "a"

    def put(self, seed: int, *, writer: str = "ci", activate: bool = True, origin: str = "register") -> Made:
        """Register a seed's bytes."""
        source = self.folder / str(seed)
        if not source.exists():
            write_adapter(source, seed)
        wanted = Registration(self.name, source, "file:///x", activate=activate, origin=origin)  # type: ignore[arg-type]
        return Made.by(ingest.register(self.registry, SCOPE, wanted, Expectation(), writer=writer))

    def load(self, seed: int) -> Made:
        """As ``POST /v1/load_lora_adapter`` does in place."""
        return self.put(seed, writer=TRAINER, origin="api")

    def take_back(self, made: Made, writer: str = TRAINER) -> None:
        take_back(self.registry, SCOPE, self.name, made, writer=writer)

    def state(self) -> tuple[str | None, set[str]]:
        """What the name serves, and what is registered."""
        pointer = release.active(self.registry, SCOPE, self.name)
        serves = pointer.revision if pointer is not None else None
        return serves, set(release.present_revisions(self.registry, SCOPE, self.name))


@pytest.fixture
def site(registry: Registry, tmp_path: Path) -> Site:
    site = Site(registry, tmp_path / "sources")
    site.put(1)
    return site


def test_two_loads_at_once(site: Site) -> None:
    """Whichever of two loads is taken back, and in whatever order, the name serves the last that stays.

    Their bytes are new, or served already, or the other one's, too.
    """
    pairs, orders = ((1, 2), (2, 1), (2, 2), (2, 3)), ((0,), (1,), (0, 1), (1, 0))
    for number, (pair, order) in enumerate(itertools.product(pairs, orders)):
        site.name = f"b{number}"
        site.put(1)
        made = [site.load(seed) for seed in pair]
        for which in order:
            site.take_back(made[which])
        stay = [one.revision for which, one in enumerate(made) if which not in order]
        assert site.state() == (["v1", *stay][-1], {"v1", *stay}), (pair, order)


@pytest.mark.parametrize("active", [True, False])
def test_what_was_registered_before_stays_as_it_was(site: Site, active: bool) -> None:
    """Its record is not written, and it is served only if it was."""
    site.put(2, activate=active)
    before, records = site.state(), release.present_revisions(site.registry, SCOPE, "a")
    for _ in range(2):
        made = site.load(2)
        assert site.state()[0] == "v2"
        site.take_back(made)
        site.take_back(made)
        assert site.state() == before
        assert release.present_revisions(site.registry, SCOPE, "a") == records


def test_a_record_that_another_one_wrote_last_stays(site: Site) -> None:
    """It was pinned since, or it is another caller's: who may register alone takes nobody's record away."""
    made = site.load(2)
    site.take_back(made, "http:somebody@10.0.0.2")
    assert site.state() == ("v1", {"v1", "v2"})
    pinned = site.load(3)
    amend.amend(site.registry, SCOPE, "a", [amend.with_labels({"kept": "yes"})], writer="ci", revision="v3")
    site.take_back(pinned)
    assert site.state() == ("v1", {"v1", "v2", "v3"})


def test_no_path_is_a_revision(site: Site) -> None:
    """A revision that is no name is refused before anything is read."""
    with pytest.raises(InputError):
        site.take_back(Made(revision="../v1", pointer="p", record="r"))
