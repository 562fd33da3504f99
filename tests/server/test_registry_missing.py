"""A sidecar whose root holds no registry: its volume is not mounted, or nobody made a registry yet."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.reconcile.assembly import assemble
from lora_fs.sidecar.registry.lifecycle import ingest
from lora_fs.sidecar.registry.lifecycle.ingest import Registration
from lora_fs.sidecar.registry.store import marker
from lora_fs.sidecar.registry.store.writer import Registry
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.settings import Settings
from lora_fs.sidecar.validate import Expectation
from tests.reconcile.conftest import FakeEngine as Engine
from tests.registry.conftest import write_adapter
from tests.server.conftest import FakeEngine, serving

SOON_S = 60  # a marker that went alone is found by the next look at every folder
BASE = "tiny"


@contextmanager
def sidecar(root: Path, engine_url: str, **given: object) -> Iterator[httpx.Client]:
    """A running one; its engine serves ``BASE``."""
    settings = Settings(
        root=root,
        model="tiny",
        stage_dir=root.parent / "stage",
        allowed_sources=(str(root.parent),),
        resync_s=0.2,
        settle_s=0.1,
        **given,
    )
    assembly = asyncio.run(assemble(settings, Expectation(), Engine(base=(BASE,))))
    app = create_app(
        assembly.replica,
        engine_url=engine_url,
        admin=Admin(None, insecure="loopback"),
        background=assembly.running,
    )
    with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def conditions(client: httpx.Client) -> tuple[int, list[str]]:
    answer = client.get("/readyz")
    return answer.status_code, answer.json()["conditions"]


def wait_for(client: httpx.Client, ready: int, *says: str) -> None:
    """Until ``/readyz`` answers so, and one condition says all of it; none where nothing is to be said."""

    def told() -> bool:
        status, found = conditions(client)
        return status == ready and (
            any(all(word in one for word in says) for one in found) if says else not found
        )

    wait_until(f"{ready} {says}", told, timeout_s=SOON_S)


def complete(client: httpx.Client, model: str) -> int:
    return client.post("/v1/completions", json={"model": model, "prompt": "x"}).status_code


def register(root: Path, name: str) -> None:
    """As the command does."""
    source = write_adapter(root.parent / "sources" / name)
    registry = Registry(root)
    wanted = Registration(name, source, source.as_uri())
    ingest.register(registry, Scope("default", "tiny"), wanted, Expectation(), writer="test")
    registry.close()


def asks(client: httpx.Client, source: Path) -> dict[str, httpx.Response]:
    """What clients ask about adapters, and every write."""
    files = {"file": ("adapter_config.json", b"{}")}
    load = {"lora_name": "a", "lora_path": str(source)}
    return {
        "complete": client.post("/v1/completions", json={"model": "a", "prompt": "x"}),
        "models": client.get("/v1/models"),
        "model": client.get("/v1/models/a"),
        "adapters": client.get("/v1/lora_adapters"),
        "list": client.get("/v1/list_lora_adapters"),
        "loras": client.get("/v1/loras"),
        "dashboard": client.get("/v1/dashboard/adapters/a"),
        "load": client.post("/v1/load_lora_adapter", json=load),
        "unload": client.post("/v1/unload_lora_adapter", json={"lora_name": "a"}),
        "upload": client.post("/v1/lora_adapters?name=a", files=files),
        "dynamo": client.post("/v1/loras", json={"lora_name": "a", "source": {"uri": source.as_uri()}}),
    }


@pytest.mark.parametrize("there", [True, False], ids=["empty", "not-there"])
def test_it_waits_for_a_registry(tmp_path: Path, engine: FakeEngine, engine_url: str, there: bool) -> None:
    """Up and not ready; adapters and writes are 503 with the reason, the base model is served, nothing is
    written; it serves soon after ``lora-fs init``, and was not started again."""
    root, source = tmp_path / "volume", write_adapter(tmp_path / "sources/a")
    if there:
        root.mkdir()
    flat = write_adapter(tmp_path / "flat/b").parent
    with sidecar(root, engine_url, nim_source=flat, nim_refresh_s=0.1) as client:
        wait_for(client, 503, "RegistryMissing", f"{root} holds no registry", f"lora-fs init --root {root}")
        assert client.get("/health").status_code == 200
        for what, answer in asks(client, source).items():
            assert answer.status_code == 503, (what, answer.text)
            assert "registry" in answer.text, what
            assert "Retry-After" in answer.headers, what
        assert complete(client, BASE) == 200
        for path in ("/", "/metrics", "/metadata", "/v1/events"):
            assert client.get(path).status_code == 200, path
        assert (list(root.iterdir()) if there else root.exists()) in ([], False)
        marker.create(root)
        wait_for(client, 200)
        register(root, "a")
        wait_until("a is listed", lambda: '"a"' in client.get("/v1/models").text, timeout_s=SOON_S)
        assert complete(client, "a") == 200
        wait_until(
            "the flat store's is, too", lambda: '"b"' in client.get("/v1/models").text, timeout_s=SOON_S
        )


def test_it_makes_one_where_it_was_told_to(tmp_path: Path, engine_url: str) -> None:
    """For demos and development."""
    with sidecar(tmp_path / "volume", engine_url, create=True) as client:
        wait_for(client, 200)
    assert marker.is_registry(tmp_path / "volume")


def _unmount(root: Path, away: Path) -> None:
    root.rename(away)
    root.mkdir()


def _remove_marker(root: Path, away: Path) -> None:
    (root / "lora-fs.json").rename(away)


@pytest.mark.parametrize("lose", [_unmount, _remove_marker])
def test_a_volume_that_goes_while_it_runs(
    tmp_path: Path, engine_url: str, lose: Callable[[Path, Path], None]
) -> None:
    """What is known is served and listed on; writes are 503; no message proposes a new registry, and none is
    made; when it is back all goes on."""
    root, away = tmp_path / "volume", tmp_path / "away"
    marker.create(root)
    register(root, "a")
    register(root, "cold")
    with sidecar(root, engine_url) as client:
        wait_for(client, 200)
        assert complete(client, "a") == 200
        lose(root, away)
        wait_for(client, 200, "VolumeUnavailable", "is its volume still mounted?")
        assert (complete(client, "a"), complete(client, "cold")) == (200, 503 if away.is_dir() else 200)
        assert '"a"' in client.get("/v1/models").text
        refused = [answer for what, answer in asks(client, tmp_path / "sources/a").items() if what in WRITES]
        assert {answer.status_code for answer in refused} == {503}, [answer.text for answer in refused]
        told = "".join([*(answer.text for answer in refused), client.get("/readyz").text])
        assert "init" not in told.replace("initial", "")
        assert "lora-fs.json" not in os.listdir(root)
        if away.is_dir():
            assert os.listdir(root) == []
            shutil.rmtree(root)
        away.rename(root if away.is_dir() else root / "lora-fs.json")
        wait_for(client, 200)
        register(root, "b")
        wait_until("b is listed", lambda: '"b"' in client.get("/v1/models").text, timeout_s=SOON_S)


WRITES = ("load", "upload")
