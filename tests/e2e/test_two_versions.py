"""A fleet of two vLLM versions on one registry: upgraded and rolled back under load, and side by side.

``ENGINE_PYTHON`` and ``OTHER_ENGINE_PYTHON`` are the interpreters of the two, as the suite ``fleet`` of
``.ci/versions.py`` gives them. Without them these tests do not run: one environment has one vLLM.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import openai
import pytest

from lora_fs.demo.engine import EngineFarm
from lora_fs.demo.pair import Pair
from lora_fs.demo.replica import PluginReplica, Replica, SidecarReplica
from lora_fs.demo.tiny_llama import MODEL_NAME
from lora_fs.demo.volume import Volume
from lora_fs.demo.waiting import wait_until
from lora_fs.sidecar.model import Phase
from lora_fs.sidecar.validate.since import SINCE
from tests.e2e.test_old_engines import scaled, version
from tests.e2e.under_load import Clients, History, Told
from tests.engine.client import owned

Adapters = Callable[[int], Path]
Right = Mapping[str, frozenset[str]]

PLAIN = ("one", "two", "three")
MOVING, PATTERNED = "moving", "patterned"

needs_two = pytest.mark.skipif(
    not {"ENGINE_PYTHON", "OTHER_ENGINE_PYTHON"} <= os.environ.keys(),
    reason="an environment has one vLLM, and this needs two: make test-versions SUITES=fleet",
)
pytestmark = needs_two


@pytest.fixture(scope="module")
def newer(work_dir: Path) -> Iterator[EngineFarm]:
    """Forks engines of the newer vLLM."""
    with EngineFarm(work_dir / "newer", python=os.environ["OTHER_ENGINE_PYTHON"]) as made:
        made.wait_imported()
        yield made


@pytest.fixture(scope="module")
def older(farm: EngineFarm) -> EngineFarm:
    """Forks engines of the older vLLM."""
    return farm


@pytest.fixture(scope="module", params=[SidecarReplica, PluginReplica], ids=["sidecar", "plugin"])
def kind(request: pytest.FixtureRequest) -> type[Replica]:
    """Both ways to run a replica keep the same promises."""
    found: type[Replica] = request.param
    return found


@pytest.fixture(scope="module")
def sources(adapters: Adapters, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Path, ...]]:
    """By name, the revisions; ``patterned`` is given both ways, for what it answers has to be known."""
    folder = tmp_path_factory.mktemp("patterned")
    pattern = (
        scaled(adapters(8), folder / way, by_pattern=way == "pattern") for way in ("pattern", "weights")
    )
    plain = {name: (adapters(seed),) for seed, name in enumerate(PLAIN)}
    return {**plain, MOVING: (adapters(5), adapters(6)), PATTERNED: tuple(pattern)}


@pytest.fixture(scope="module")
def right(
    older: EngineFarm, newer: EngineFarm, model_dir: Path, sources: Mapping[str, tuple[Path, ...]]
) -> Right:
    """What stock engines of both answer, to ``name@v1`` and ``name@v2``: no two adapters alike."""
    found: dict[str, set[str]] = {}
    for farm in (older, newer):
        with owned(farm.start("right", model_dir)) as client:
            for name, folders in sources.items():
                for number, folder in enumerate(folders, start=1):
                    called = f"{name}@v{number}"
                    assert client.load(called, folder).status == 200
                    found.setdefault(called, set()).add(client.complete(called).text.strip())
    del found[f"{PATTERNED}@v1"]  # an older one ignores the pattern
    assert sum(map(len, found.values())) <= len(found) + 1
    assert len(set().union(*found.values())) == sum(map(len, found.values()))
    return {called: frozenset(texts) for called, texts in found.items()}


@pytest.fixture(scope="module")
def fleet(
    older: EngineFarm,
    model_dir: Path,
    kind: type[Replica],
    sources: Mapping[str, tuple[Path, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair[Replica]]:
    """Two replicas of the older vLLM, and adapters of which it serves all but one."""
    work = tmp_path_factory.mktemp("fleet")
    volume = Volume(work / "volume", MODEL_NAME, cwd=model_dir.parent)
    volume.root.mkdir()
    volume.run("init")
    for name, folders in sources.items():
        for folder in folders[:1] if name == PATTERNED else folders:
            volume.run("register", name, str(folder))
    volume.run("promote", MOVING, "v1")
    settings = {"settle_s": "0.5"}
    with closing(Pair(older, model_dir, volume, work, kind=kind, settings=settings)) as pair:
        for replica in pair.both:
            replica.wait_ready(timeout_s=180)
        yield pair


class Judge:
    """What of the clients' answers was wrong, and what was an error that no restart explains."""

    def __init__(self, right: Right, engines: Mapping[str, History[EngineFarm]], older: EngineFarm) -> None:
        self.right, self.engines, self.older = right, engines, older
        self.revision = History("v1")  # of MOVING

    def may_say(self, told: Told) -> frozenset[str]:
        """The texts that are right at this time."""
        if told.name == MOVING:
            revisions = self.revision.during(told.began, told.ended)
            return frozenset().union(*(self.right[f"{MOVING}@{revision}"] for revision in revisions))
        return self.right[f"{told.name}@{'v2' if told.name == PATTERNED else 'v1'}"]

    def refused(self, told: Told) -> bool:
        """Whether it is the reason of an older engine, which may have served then."""
        is_told = told.name == PATTERNED and told.status == 400 and "engine-too-old" in told.text
        return is_told and self.older in self.serving(told)

    def serving(self, told: Told) -> list[EngineFarm]:
        """Whose engines may have answered: two while one is replaced."""
        return list(self.engines[told.replica].during(told.began, told.ended))

    def is_right(self, told: Told) -> bool:
        """Whether it is an answer that was right at this time, or that refusal."""
        return self.refused(told) or (told.status == 200 and told.text in self.may_say(told))

    def explained(self, told: Told) -> bool:
        """Whether it is right, or the 503 or cut connection of a replica that was being restarted."""
        restarting = len(self.serving(told)) > 1
        return self.is_right(told) or (restarting and told.status in (None, 503))


def restart(replica: Replica, farm: EngineFarm, *, whole: bool) -> None:
    """Its engine, or all of it, ends as a pod's does and is started from ``farm``."""
    for process in reversed(replica.processes) if whole else (replica.engine,):
        process.stop()
    replica.move(farm)
    if whole:
        replica.start()
    else:
        replica.start_engine()
    replica.engine.wait_ready(timeout_s=180)
    replica.wait_ready(timeout_s=180)


@pytest.mark.timeout(900)  # six starts of an engine, beside clients that take what processor there is
def test_a_fleet_that_is_upgraded_and_rolled_back_under_load(
    fleet: Pair[Replica], right: Right, older: EngineFarm, newer: EngineFarm
) -> None:
    """No answer is wrong, and none is an error but of a replica that is restarted at that moment.

    What the older vLLM serves wrong it refuses with the reason, also with the newer one's copies staged.
    """
    engines = {replica.name: History(older) for replica in fleet.both}
    judge = Judge(right, engines, older)
    names = (*PLAIN, MOVING, PATTERNED)
    with ExitStack() as stack:
        clients = [stack.enter_context(Clients(replica, names)) for replica in fleet.both]

        def all_right() -> None:
            for asking in clients:
                asking.wait_each(judge.is_right)

        all_right()
        for farm, revision in ((newer, "v2"), (older, "v1")):
            for replica in fleet.both:
                with engines[replica.name].replaced(farm):
                    restart(replica, farm, whole=farm is newer)
                all_right()
            with judge.revision.replaced(revision):
                fleet.volume.run("promote", MOVING, revision, "--wait", "20")
            all_right()
    told = [one for asking in clients for one in asking.told]
    assert [one for one in told if one.status == 200 and not judge.is_right(one)] == []
    assert [one for one in told if not judge.explained(one)] == []
    served = [one for one in told if one.name == PATTERNED and one.status == 200]
    assert served
    assert all(newer in judge.serving(one) for one in served)
    for name in engines:
        count = Counter(str(one.status) for one in told if one.replica == name)
        print(f"{name}: {dict(count)}, slowest {max(one.ended - one.began for one in told):.1f} s")


def test_two_versions_serve_side_by_side(
    fleet: Pair[Replica], right: Right, older: EngineFarm, newer: EngineFarm
) -> None:
    """Each replica serves what it can; ``status`` says who cannot and why, and ``/metadata`` who has it."""
    old, new = fleet.both
    restart(old, older, whole=True)
    restart(new, newer, whole=True)
    for name in PLAIN:
        assert {fleet.answer(name)} <= right[f"{name}@v1"]
    assert {new.answer(PATTERNED)} <= right[f"{PATTERNED}@v2"]
    with pytest.raises(openai.BadRequestError, match="engine-too-old"):
        old.answer(PATTERNED)
    assert PATTERNED in new.http.get("/metadata").raise_for_status().json()["lora"]["loaded_loras"]
    assert PATTERNED not in old.http.get("/metadata").raise_for_status().json()["lora"]["loaded_loras"]
    since = SINCE["alpha_pattern"]
    assert version(old) < since <= version(new)

    def both_told() -> bool:
        rows = json.loads(fleet.volume.run("status", "-o", "json").stdout)["adapters"]
        phases = {row["replica"]: row for row in rows if row["adapter"] == PATTERNED}
        return {name: row["phase"] for name, row in phases.items()} == {
            old.name: Phase.FAILED,
            new.name: Phase.READY,
        } and f"vLLM {version(old)}, ignores it" in phases[old.name]["reason"]

    wait_until("status says who cannot serve it, and why", both_told, timeout_s=60)
