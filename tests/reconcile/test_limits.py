"""What a replica tells of the limits that it judges adapters by, and what others make of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.engine.protocol import Facts
from lora_fs.sidecar.model import EngineLimits, ReplicaStatus, Scope
from lora_fs.sidecar.reconcile.limits import limits_of, with_fleet
from lora_fs.sidecar.registry.format.layout import Layout
from lora_fs.sidecar.registry.format.sealed import decode, seal
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.validate import Expectation, Learned, Peer
from tests.reconcile.conftest import Rig

anyio = pytest.mark.anyio
MakeRig = Callable[..., Rig]
SCOPE = Scope("default", "tiny")
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "rope_theta": 1.0,
    "head_dim": None,
}
KNOWN = Expectation(
    ("acme/tiny", "tiny"), CONFIG, 16, frozenset({"pickle"}), True, Learned(names=("/models/tiny",))
)


def test_what_is_not_known_is_absent_from_the_file() -> None:
    """A replica that knows nothing of its engine tells of no rank, no version and no base model."""
    limits = limits_of(Expectation(), Facts(), None, None)
    assert limits.model_dump(mode="json") == {"strict_base_model": False, "allow": []}
    status = ReplicaStatus(replica="r", model="tiny", namespaces=("default",), limits=limits)
    assert decode(ReplicaStatus, seal(status)).limits == limits


def test_what_is_known_is_told() -> None:
    """Of the base model's config those fields alone that adapters are compared with."""
    told = limits_of(KNOWN, Facts(64, "bfloat16"), "0.32.0", True)
    assert told.model_dump(mode="json") == {
        "engine_version": "0.32.0",
        "runtime_loading": True,
        "max_lora_rank": 16,
        "dtype": "bfloat16",
        "base_models": ["acme/tiny", "tiny"],
        "engine_models": ["/models/tiny"],
        "base_config": {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2},
        "strict_base_model": True,
        "allow": ["pickle"],
    }


@pytest.mark.parametrize(
    ("by_setting", "by_engine", "told"),
    [(16, 8, 8), (8, 16, 8), (None, 16, 16), (8, None, 8), (None, None, None)],
)
def test_the_lesser_rank_holds(by_setting: int | None, by_engine: int | None, told: int | None) -> None:
    """An adapter above either the setting or the engine's own limit is served by neither."""
    assert (
        limits_of(Expectation(max_rank=by_setting), Facts(max_lora_rank=by_engine), None, None).max_lora_rank
        == told
    )


@anyio
async def test_an_engine_that_is_silent_says_nothing(make_rig: MakeRig) -> None:
    """What it said before may be another engine's by the time it answers."""
    rig = make_rig()
    rig.engine.facts, rig.engine.says = Facts(16, "float16"), "0.32.0"
    assert rig.replica.facts() == (Facts(), None, None)
    await rig.settle()
    assert rig.replica.facts() == (rig.engine.facts, "0.32.0", True)
    rig.engine.cannot_load = "it has no route"
    await rig.settle()
    assert rig.replica.facts() == (rig.engine.facts, "0.32.0", False)
    rig.engine.up = False
    await rig.settle()
    assert rig.replica.facts() == (Facts(), None, None)


class Fleet:
    """Status files on a volume."""

    def __init__(self, root: Path) -> None:
        marker.create(root)
        self.layout = Layout(root)
        self.layout.replicas.mkdir(exist_ok=True)

    def report(
        self, replica: str, limits: EngineLimits | None, *, age_s: float = 0, namespace: str = "default"
    ) -> None:
        at = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age_s)
        status = ReplicaStatus(
            replica=replica, model="tiny", namespaces=(namespace,), updated_at=at.isoformat(), limits=limits
        )
        self.layout.replica(replica).write_bytes(seal(status))

    def peers(self) -> dict[str, Peer]:
        return {peer.replica: peer for peer in with_fleet(Expectation(), self.layout, SCOPE).fleet}


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    return Fleet(tmp_path / "root")


def test_a_replica_is_judged_for_as_it_judges(fleet: Fleet) -> None:
    """What it told is what validation expects in its place."""
    fleet.report("r", limits_of(KNOWN, Facts(), "0.31.0", False))
    told = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2}
    judge = Expectation(KNOWN.model_ids, told, 16, KNOWN.allow, True, Learned(names=("/models/tiny",)))
    assert fleet.peers() == {"r": Peer("r", judge, False, "0.31.0")}


def test_replicas_that_are_gone_or_serve_others_are_left_out(fleet: Fleet) -> None:
    """A report of a minute ago, or of another namespace, says nothing of who will serve an adapter."""
    for name, more in {"old": {"age_s": 3600}, "elsewhere": {"namespace": "b"}, "here": {}}.items():
        fleet.report(name, EngineLimits(max_lora_rank=8), **more)  # type: ignore[arg-type]
    assert fleet.peers().keys() == {"here"}


def test_a_replica_of_which_nothing_can_be_read_may_serve_anything(fleet: Fleet) -> None:
    """One of an earlier version, and one whose report is damaged, are known by name alone."""
    fleet.report("earlier", None)
    fleet.report("damaged", None)
    fleet.layout.replica("damaged").write_bytes(b"{")
    assert fleet.peers() == {"earlier": Peer("earlier"), "damaged": Peer("damaged")}


def test_codes_of_another_version_are_passed_over(fleet: Fleet) -> None:
    """A replica may allow what this version does not know, or lets nobody allow."""
    fleet.report("newer", EngineLimits(allow=("base-model", "from-the-future", "truncated")))
    assert fleet.peers()["newer"].judges_by.allow == {"base-model"}


def test_reports_that_cannot_be_listed_refuse_nothing(tmp_path: Path) -> None:
    """Which replicas there are is unknown then, and the adapter is judged by what is known here."""
    assert with_fleet(KNOWN, Layout(tmp_path / "gone"), SCOPE) == KNOWN
