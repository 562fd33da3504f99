"""A replica whose engine, stage and volume are in memory, and whose clock is the test's."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from lora_fs.sidecar.engine.protocol import Activity, Facts, Loaded
from lora_fs.sidecar.errors import (
    EngineGone,
    EngineUnavailable,
    LoraFsError,
    NameTaken,
    NotFound,
    VolumeUnavailable,
)
from lora_fs.sidecar.model import (
    AdapterKey,
    Canary,
    Pointer,
    Policy,
    Record,
    Scope,
    State,
    public_of,
    tells_bytes,
)
from lora_fs.sidecar.reconcile.admin.service import Registrations
from lora_fs.sidecar.reconcile.catalog import Served
from lora_fs.sidecar.reconcile.reconciler import Limits
from lora_fs.sidecar.reconcile.replica import Replica
from lora_fs.sidecar.reconcile.stage.jobs import Stager
from lora_fs.sidecar.reconcile.stage.trusted import Trusted
from lora_fs.sidecar.reconcile.watch.watcher import Volume
from lora_fs.sidecar.registry.view.snapshot import Desired, Growing
from tests.reconcile.test_plan import RECORD

SCOPE = Scope("default", "tiny")


@dataclass
class FakeEngine:
    """Loads at once unless ``gate`` is closed; refuses a copy whose name holds one of ``refuses``.

    A call for one of ``stuck`` hangs until ``unstick`` is set; an unload of one of ``keeps`` fails. These,
    ``busy``, ``loads`` and ``unloads`` hold public names.
    """

    adapters: dict[str, str] = field(default_factory=dict)
    base: tuple[str, ...] = ("tiny",)
    loads: list[str] = field(default_factory=list)
    refuses: dict[str, LoraFsError] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    has_metrics: bool = True
    is_new: bool = True  # what it says of its activity
    up: bool = True
    cannot_load: str | None = None
    facts: Facts = field(default_factory=Facts)
    rereads: bool = False
    is_own: bool = False
    max_cpu_loras: int | None = None
    silent: bool = False  # when it is asked for that number
    policies: Mapping[str, Policy] = field(default_factory=dict)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    asked: asyncio.Event = field(default_factory=asyncio.Event)  # to load or unload
    stuck: set[str] = field(default_factory=set)
    unstick: asyncio.Event = field(default_factory=asyncio.Event)
    keeps: set[str] = field(default_factory=set)
    unloads: list[str] = field(default_factory=list)
    reads: int = 0
    says: str | None = "0.32.0"  # its version
    says_asked: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    async def loaded(self) -> Loaded:
        self._check_up()
        self.reads += 1
        cards = {name: {"id": name, "root": path, "parent": "tiny"} for name, path in self.adapters.items()}
        base = tuple({"id": name} for name in self.base)
        return Loaded(base, dict(self.adapters), cards, cannot_load=self.cannot_load, facts=self.facts)

    async def version(self) -> str | None:
        self._check_up()
        self.says_asked += 1
        return self.says

    async def holds_most(self) -> int | None:
        if self.silent:
            raise EngineUnavailable("/server_info did not answer")
        return self.max_cpu_loras

    async def activity(self) -> Activity:
        self._check_up()
        if not self.has_metrics:
            raise EngineUnavailable("/metrics answered 500")
        busy = frozenset(name for name in self.adapters if public_of(name) in self.busy)
        return Activity(busy, is_new=self.is_new)

    def public(self) -> set[str]:
        """The public names of what it has."""
        return set(map(public_of, self.adapters))

    def copies(self) -> dict[str, str]:
        """Public name → copy; of one whose bytes are replaced the one that came last."""
        return {public_of(name): path for name, path in self.adapters.items()}

    def name(self, public: str) -> str:
        """What it calls the one adapter of a public name."""
        (found,) = (name for name in self.adapters if public_of(name) == public)
        return found

    def prefer(self, policies: Mapping[str, Policy]) -> None:
        self.policies = policies

    async def load(self, name: str, path: str, record: Record, *, spare: bool = False) -> None:
        self._check_up()
        assert tells_bytes(name, record.spec.digest), "no plain name reaches an engine"
        self.loads.append(public_of(name))
        await self._begin(name)
        if self.adapters.get(name, path) != path:  # as a real one does
            raise NameTaken(f"{name} is taken", reason="taken", path=self.adapters[name])
        for fragment, error in self.refuses.items():
            if fragment in path.rpartition("/")[2]:  # not in the digest before it
                raise error
        self.adapters[name] = path

    async def unload(self, name: str) -> None:
        self._check_up()
        self.unloads.append(public_of(name))
        await self._begin(name)
        if public_of(name) in self.keeps:
            raise EngineUnavailable("engine cannot unload now (503)")
        self.adapters.pop(name, None)

    async def _begin(self, name: str) -> None:
        self.asked.set()
        await self.gate.wait()
        if public_of(name) in self.stuck:
            await self.unstick.wait()
        self._check_up()

    def _check_up(self) -> None:
        if not self.up:
            raise EngineGone("connection refused")


class FakeRegistrations:
    """Nothing was ever registered, and nothing comes."""

    downloads = SimpleNamespace(under_way=dict)

    async def unregister(self, lora_name: str, served: Served | None, writer: str) -> None:
        raise NotFound(lora_name)


@dataclass
class FakeStager:
    """Copies nothing; a path tells the revision."""

    staged: Counter[str] = field(default_factory=Counter)
    refuses: dict[str, LoraFsError] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    swept: list[set[str]] = field(default_factory=list)
    waiting: dict[str, LoraFsError] = field(default_factory=dict)
    configs: dict[str, bytes] = field(default_factory=dict)  # by name
    trusted: Trusted = field(default_factory=lambda: Trusted(None, lambda record: Path(record.spec.path)))

    @property
    def copies(self) -> int:
        return len(self.staged)

    def path(self, record: Record) -> str:
        return f"/stage/{record.spec.digest[7:]}/{record.name}-{record.revision}"

    def owns(self, path: str) -> bool:
        return path.startswith("/stage/")

    async def stage(self, record: Record) -> str:
        self.staged[record.name] += 1
        if record.name in self.refuses:
            raise self.refuses[record.name]
        return self.path(record)

    async def config(self, record: Record) -> bytes:
        return self.configs.get(record.name, b"{}")

    async def mend(self, record: Record) -> bool:
        return False

    def use(self, paths: set[str]) -> None:
        self.used = set(paths)

    def use_also(self, path: str) -> None:
        self.used.add(path)

    def sweep(self, registered: frozenset[str]) -> None:
        self.swept.append({*self.used})


@dataclass
class FakeVolume:
    """The desired state, written by the test."""

    desired: Desired = field(default_factory=Desired)
    recent: dict[str, int] = field(default_factory=dict)
    read_once: bool = True
    status_problem: str | None = None

    def conditions(self) -> tuple[str, ...]:
        return ()

    def check_read(self) -> None:
        if not self.read_once:
            raise VolumeUnavailable("the registry has not been read yet")

    def put(self, name: str, revision: str = "v1", policy: Policy | None = None, content: int = 0) -> Record:
        """Register a revision and let the plain name serve it; another ``content`` overwrites it."""
        digest = f"sha256:{hashlib.sha256(f'{name} {revision} {content}'.encode()).hexdigest()}"
        spec = RECORD.spec.model_copy(update={"digest": digest, "policy": policy})
        record = RECORD.model_copy(update={"name": name, "revision": revision, "spec": spec})
        self.write({record.key: record}, name, revision)
        return record

    def remove(self, name: str) -> None:
        """Withdraw a name and its revisions."""
        gone = {"state": State.DELETED, "generation": 2}
        records = {k: r.model_copy(update=gone) for k, r in self.desired.records.items() if k.name == name}
        self.write(records, name, None)

    def point(self, name: str, revision: str, canary: Canary | None = None) -> None:
        """Promote, or try another revision."""
        self.write({}, name, revision, canary)

    def write(
        self,
        records: dict[AdapterKey, Record],
        name: str,
        revision: str | None,
        canary: Canary | None = None,
        scope: Scope = SCOPE,
    ) -> None:
        """Records of a name, and its pointer, at once."""
        pointer = Pointer(
            namespace=scope.namespace,
            model=scope.model,
            name=name,
            generation=1,
            request_id="r",
            token="t",
            writer="test",
            updated_at="",
            revision=revision,
            canary=canary,
        )
        version = 1 + max(self.recent.values(), default=0)
        changed = [*map(str, records), f"{scope}/.active/{name}"]
        self.recent = {**self.recent, **dict.fromkeys(changed, version)}
        known, pointers = Growing(self.desired.records), Growing(self.desired.pointers)
        for key, record in records.items():
            known.put(key, record)
        pointers.put((scope, name), pointer)
        self.desired = Desired(known.whole(), pointers.whole())


@dataclass
class Clock:
    """Seconds, moved by hand."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Rig:
    """One replica and everything around it."""

    engine: FakeEngine
    stager: FakeStager
    volume: FakeVolume
    clock: Clock
    limits: Limits

    def __post_init__(self) -> None:
        self.replica = self.start()

    def start(self, namespaces: tuple[str, ...] = ("default",)) -> Replica:
        """A replica as after a start: it knows nothing but what it can see."""
        return Replica(
            "r0",
            "tiny",
            namespaces,
            cast("Volume", self.volume),
            cast("Registrations", FakeRegistrations()),
            self.engine,
            cast("Stager", self.stager),
            self.limits,
            clock=self.clock,
        )

    async def settle(self) -> None:
        """Passes until nothing changes; loads that were started have ended."""
        for _ in range(4):
            await self.replica.reconcile()
            for _ in range(20):
                await asyncio.sleep(0)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def make_rig() -> Callable[..., Rig]:
    """``make_rig(max_loaded=2)``."""

    def make(max_loaded: int | None = None) -> Rig:
        limits = Limits(Policy(ttl_s=60), max_loaded, resync_s=5, hold_timeout_s=5)
        return Rig(FakeEngine(), FakeStager(), FakeVolume(), Clock(), limits)

    return make
