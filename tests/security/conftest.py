"""A sidecar of two tenants before a fake engine, and the registry and command line of other tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from lora_fs.sidecar.model import JsonObject, Record
from lora_fs.sidecar.reconcile.catalog import Catalog, Served
from lora_fs.sidecar.registry.lifecycle.undo import Made
from lora_fs.sidecar.server.app import create_app
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.audit import Trail
from lora_fs.sidecar.server.ports import Loaded, LoadRequest
from tests.cli.conftest import folder, lora_fs, root
from tests.reconcile.test_plan import RECORD
from tests.registry.conftest import make_adapter, registry, scope
from tests.server.conftest import FakeReplica, engine, engine_url, serving

__all__ = ["engine", "engine_url", "folder", "lora_fs", "make_adapter", "registry", "root", "scope"]

TOKENS = """\
# everybody who may do something
all-of-it-4711        name=operators
only-a-0815           name=ci-a      namespaces=team-a
looks-at-a-42         name=board-a   namespaces=team-a verbs=read
"""
OPERATORS, CI_A, BOARD_A = "all-of-it-4711", "only-a-0815", "looks-at-a-42"


@dataclass
class Tenants(FakeReplica):
    """Serves one adapter of ``team-a`` and one of ``team-b``; keeps what it was asked to change."""

    names: tuple[str, ...] = ("team-a/sql", "team-b/law")
    namespaces: tuple[str, ...] = ("team-a", "team-b")
    writers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.names:
            self.events.tell("Loaded", key=self.record(name).key)

    def record(self, name: str) -> Record:
        namespace, _, bare = name.partition("/")
        return RECORD.model_copy(update={"namespace": namespace, "name": bare})

    def catalog(self) -> Catalog:
        return Catalog(self.version, {name: Served(name, self.record(name)) for name in self.names})

    async def load_adapter(self, request: LoadRequest, *, writer: str) -> Loaded:
        self.writers.append(writer)
        return Loaded(self.record(request.lora_name), Made(revision="v1"))

    async def unload_adapter(self, lora_name: str, *, writer: str) -> None:
        self.writers.append(writer)
        await super().unload_adapter(lora_name, writer=writer)


@pytest.fixture
def replica() -> Tenants:
    return Tenants()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(TOKENS)
    return file


Sidecar = Callable[..., "httpx.Client"]


@pytest.fixture
def sidecar(replica: Tenants, engine_url: str, tmp_path: Path) -> Iterator[Sidecar]:
    """``sidecar(token_file, public)``: a client of a sidecar that is set so, told to ``audit``.

    It is insecure: without a token file the client, which is on this machine, may register.
    """
    with _open() as opened:

        def start(
            token_file: Path | None, public: tuple[str, ...] = ("*",), engine_key: str | None = None
        ) -> httpx.Client:
            trail, admin = Trail(tmp_path / "audit"), Admin(token_file, public, insecure="loopback")
            app = create_app(replica, engine_url=engine_url, admin=admin, trail=trail, engine_key=engine_key)
            return opened(app)

        yield start


@contextmanager
def _open() -> Iterator[Callable[[object], httpx.Client]]:
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(app: object) -> httpx.Client:
            url = stack.enter_context(serving(app))
            return stack.enter_context(httpx.Client(base_url=url, timeout=60))

        yield start


def bearer(token: str) -> dict[str, str]:
    """The header that a client sends."""
    return {"Authorization": f"Bearer {token}"}


def load(name: str) -> JsonObject:
    """A load's body."""
    return {"lora_name": name, "lora_path": "/adapters/x"}
