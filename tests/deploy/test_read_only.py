"""A pod of ``storage.readOnly``: its mounts are made for real, and a replica runs on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import VolumeUnavailable
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.registry.view.reports import read_events, read_reports
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.deploy.test_helm import MODES, merged, objects, pod
from tests.deploy.test_kubernetes import Object
from tests.e2e import mounts
from tests.reconcile.conftest import FakeEngine
from tests.reconcile.test_worker import until
from tests.registry.conftest import write_adapter

SCOPE = Scope("default", "tiny")
VALUES: Object = {"storage": {"readOnly": True}}
TOLD_S = 60.0


def of_the_volume(mode: str) -> list[Object]:
    """The mounts of the registry's volume, in the container where lora-fs runs."""
    (container,) = pod(objects(merged(VALUES, {"mode": mode})))[
        "initContainers" if mode == "sidecar" else "containers"
    ]
    return [one for one in container["volumeMounts"] if one["name"] == "adapters"]


@pytest.mark.parametrize("mode", MODES)
def test_the_volume_is_read_only_but_for_two_folders(mode: str) -> None:
    """The root of the mount is not written to by any pod that serves."""
    whole, *parts = of_the_volume(mode)
    assert whole == {"name": "adapters", "mountPath": "/adapters", "readOnly": True}
    assert [one["mountPath"] for one in parts] == [f"/adapters/{one['subPath']}" for one in parts]
    assert {one["subPath"] for one in parts} == {".replicas", ".events"}


def test_what_makes_and_cleans_the_registry_writes() -> None:
    """The Job of `lora-fs init` and the CronJob of `lora-fs gc` are no pods that serve."""
    kinds = objects(merged(VALUES, {"gc": {"enabled": True}}))
    init, gc = kinds["Job"]["spec"], kinds["CronJob"]["spec"]["jobTemplate"]["spec"]
    for job in (init, gc):
        (container,) = job["template"]["spec"]["containers"]
        assert container["volumeMounts"] == [{"name": "adapters", "mountPath": "/adapters"}]


@pytest.fixture
def volume(tmp_path: Path) -> Registry:
    """A registry as `lora-fs init` makes it, with one adapter."""
    registry = Registry(tmp_path / "volume", create=True)
    folder = write_adapter(tmp_path / "source")
    ingest.register(
        registry, SCOPE, Registration("sql", folder, folder.as_uri()), Expectation(), writer="test"
    )
    return registry


@pytest.fixture(params=MODES)
def mounted(request: pytest.FixtureRequest, volume: Registry, tmp_path: Path) -> Iterator[Path]:
    """The volume at the place that the container has for it, mounted as the chart says."""
    if not mounts.may_mount():
        pytest.skip("mounting needs root and /dev/fuse, which this machine does not give")
    made: list[Path] = []
    try:
        for one in of_the_volume(request.param):
            source = volume.layout.root / one.get("subPath", "")
            place = tmp_path / one["mountPath"].lstrip("/")
            if not made:
                place.mkdir()  # the container's own; a subPath's must be there
            mounts.mount("--bind", str(source), str(place))
            made.append(place)
            if one.get("readOnly"):
                mounts.mount("-o", "remount,bind,ro", str(place))
        yield made[0]
    finally:
        for place in reversed(made):
            mounts.detach(place)


def test_a_replica_serves_and_reports(mounted: Path, volume: Registry, tmp_path: Path) -> None:
    """An adapter is loaded, status and events arrive on the volume, and a change is refused."""
    settings = Settings(root=mounted, model="tiny", replica_id="pod", stage_dir=tmp_path / "stage")

    async def serve() -> tuple[str, ...]:
        assembly = await assemble(settings, Expectation(), FakeEngine())
        async with asyncio.timeout(TOLD_S), assembly.running():
            await until(lambda: assembly.replica.readiness().ready)
            async with assembly.replica.hold("sql", TOLD_S):
                pass
            await until(reported)
            with pytest.raises(VolumeUnavailable, match="mounted read-only here"):
                await assembly.replica.unload_adapter("sql", writer="test")
            return assembly.replica.readiness().conditions

    def reported() -> bool:
        phases = [one.adapters["sql"].phase for one in read_reports(volume.layout).replicas if one.adapters]
        return phases == ["Ready"] and any(one.events for one in read_events(volume.layout).lists)

    conditions = asyncio.run(serve())
    assert not any("StatusNotWritten" in one for one in conditions)
