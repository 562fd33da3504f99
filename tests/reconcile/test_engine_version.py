"""What an engine of its version serves wrong is refused by its replica, and by no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_fs.sidecar.errors import EngineUnavailable, InvalidAdapter
from lora_fs.sidecar.model import Phase, Policy, PolicyKind, Record
from tests.reconcile.conftest import Rig

MakeRig = Callable[..., Rig]

pytestmark = pytest.mark.anyio

PATTERNS = b'{"alpha_pattern": {"q_proj": 64}}'


async def use(rig: Rig, name: str) -> str:
    """One request."""
    async with rig.replica.hold(name, 5) as engine_name:
        return engine_name


def with_patterns(rig: Rig, says: str | None, policy: Policy | None = None) -> Rig:
    """An engine of this version, an adapter with patterns, and a plain one."""
    rig.engine.says = says
    rig.stager.configs["patterned"] = PATTERNS
    for name in ("patterned", "plain"):
        rig.volume.put(name, policy=policy)
    return rig


@pytest.mark.parametrize("says", ["0.31.0+cpu", None, "dev"])
async def test_an_engine_that_is_too_old(make_rig: MakeRig, says: str | None) -> None:
    """The adapter fails with the finding and is never given to the engine; others are served."""
    rig = with_patterns(make_rig(), says)
    await rig.settle()
    for _ in range(2):
        with pytest.raises(InvalidAdapter, match="engine-too-old"):
            await use(rig, "patterned")
    await use(rig, "plain")
    await rig.settle()
    status = rig.replica.notable()[0]["patterned"]
    assert (status.phase, status.reason) == (Phase.FAILED, "InvalidAdapter")
    assert "vLLM 0.32 or newer" in status.message
    assert not any("patterned" in name for name in rig.engine.loads)
    assert rig.replica.readiness().ready


async def test_an_unknown_version_is_told(make_rig: MakeRig) -> None:
    """By a condition, with what the engine said; a version that is one ends it."""
    rig = make_rig()
    rig.engine.says = "a fork's"
    await rig.settle()
    (told,) = rig.replica.readiness().conditions
    assert told.startswith("EngineVersionUnknown: ")
    assert "a fork's" in told
    assert rig.replica.readiness().ready
    rig.engine.says = "0.32.0"
    await rig.settle()
    assert rig.replica.readiness().conditions == ()
    assert rig.replica.engine_version == "0.32.0"


async def test_an_engine_that_was_upgraded_is_tried_at_once(make_rig: MakeRig) -> None:
    """What the one before could not serve waits out no delay."""
    rig = with_patterns(make_rig(), "0.31.0", Policy(kind=PolicyKind.EAGER))
    await rig.settle()
    assert rig.replica.notable()[0]["patterned"].phase is Phase.FAILED
    rig.engine.says = "0.33.0"
    rig.engine.adapters.clear()
    await rig.settle()
    assert rig.replica.notable()[0]["patterned"].phase is Phase.READY


async def test_an_engine_that_was_rolled_back_between_two_looks(make_rig: MakeRig) -> None:
    """Each load of such an adapter asks for the version: the last look's tells of another process."""
    rig = with_patterns(make_rig(), "0.32.0")
    await rig.settle()
    await use(rig, "patterned")
    rig.engine.says = "0.31.0"
    for name in list(rig.engine.adapters):
        rig.replica.forget(name)
    rig.engine.adapters.clear()
    with pytest.raises(InvalidAdapter, match="engine-too-old"):
        await use(rig, "patterned")
    assert rig.engine.adapters == {}


async def test_an_engine_that_does_not_say_its_version_now(make_rig: MakeRig) -> None:
    """It is tried again, and nothing is loaded meanwhile."""
    rig = with_patterns(make_rig(), "0.32.0")
    await rig.settle()
    rig.engine.up = False
    with pytest.raises(EngineUnavailable):
        await use(rig, "patterned")
    rig.engine.up = True
    await use(rig, "patterned")
    assert rig.engine.loads


@pytest.mark.parametrize(("says", "reads"), [("0.32.0", []), ("0.31.0", ["plain"]), (None, ["plain"])])
async def test_an_own_engine_that_heeds_every_field(
    make_rig: MakeRig, says: str | None, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy's config is read once more: what this process's vLLM is does not change."""
    rig, read = make_rig(), list[str]()
    config = rig.stager.config

    async def watched(record: Record) -> bytes:
        read.append(record.name)
        return await config(record)

    monkeypatch.setattr(rig.stager, "config", watched)
    rig.engine.is_own, rig.engine.says = True, says
    rig.volume.put("plain")
    await rig.settle()
    await use(rig, "plain")
    assert read == reads


async def test_an_engine_that_serves_is_asked_once(make_rig: MakeRig) -> None:
    """Looks at it, for a pass or for room, ask for its models alone."""
    rig = make_rig(1)
    for name in ("a", "b"):
        rig.volume.put(name)
    await rig.settle()
    await use(rig, "a")
    await rig.settle()
    asked, reads = rig.engine.says_asked, rig.engine.reads
    for name in ("b", "a"):
        await use(rig, name)
        await rig.settle()
    assert rig.engine.says_asked == asked
    assert rig.engine.reads > reads


@pytest.mark.parametrize("sign", ["silence", "a lost adapter", "a request without its adapter"])
async def test_an_engine_that_was_restarted_is_asked_again(make_rig: MakeRig, sign: str) -> None:
    """Its version, and how many adapters it keeps in memory, are those of the new process."""
    rig = make_rig()
    rig.engine.rereads, rig.engine.max_cpu_loras = True, 4
    rig.volume.put("a", policy=Policy(kind=PolicyKind.EAGER))
    await rig.settle()
    assert (rig.replica.engine_version, rig.replica.capacity()) == ("0.32.0", 4)
    (loaded,) = rig.engine.adapters
    rig.engine.says, rig.engine.max_cpu_loras = "0.33.0", 2
    if sign == "silence":
        rig.engine.up = False
        await rig.settle()
        rig.engine.up = True
    else:
        rig.engine.adapters.clear()
    if sign == "a request without its adapter":
        rig.replica.forget(loaded)
        await use(rig, "a")
    await rig.settle()
    assert (rig.replica.engine_version, rig.replica.capacity()) == ("0.33.0", 2)
