"""Who may see what the engine lists and this replica did not load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lora_fs.sidecar.reconcile.residents.foreign import UNKNOWN
from lora_fs.sidecar.registry.view.snapshot import no_pointers
from tests.reconcile.conftest import Rig

pytestmark = pytest.mark.anyio

MakeRig = Callable[..., Rig]
COPY = f"/other-stage/{'0a' * 32}/"


async def kept_to(rig: Rig, adapters: dict[str, str], *namespaces: str) -> dict[str, str | None]:
    """For each name that the engine has, the namespace whose readers may see it."""
    rig.engine.adapters = adapters
    rig.replica = rig.start(namespaces or rig.replica.namespaces)
    await rig.settle()
    assert rig.engine.adapters == adapters  # it may be another sidecar's
    assert all(map(rig.replica.passes_through, adapters))
    return {name: rig.replica.kept_to(name) for name in ("tiny", "none", *adapters)}


async def test_of_one_namespace(make_rig: MakeRig) -> None:
    """What is registered there, or was, and every copy of a sidecar's; the engine's own is everybody's."""
    rig = make_rig()
    for name in ("tiny", "served", "gone"):
        rig.volume.put(name)
    rig.volume.remove("gone")
    elsewhere = {
        "served": "/elsewhere",
        "served@v1": "/elsewhere",
        "gone": "/elsewhere",
        "own": "/models/own",
    }
    copies = {"forgotten": COPY + "forgotten", "team-b/sql@v1": COPY + "sql", "odd": COPY + "even"}
    assert await kept_to(rig, {**elsewhere, **copies}) == {
        "tiny": None,
        "none": None,
        "served": "default",
        "served@v1": "default",
        "gone": "default",
        "own": None,
        "forgotten": UNKNOWN,
        "team-b/sql@v1": UNKNOWN,
        "odd": None,
    }


async def test_another_sidecars_copies_under_names_that_tell_their_bytes(make_rig: MakeRig) -> None:
    """No client knows these names: none is listed or passed through. Another folder's digest is none."""
    rig, digest = make_rig(), "0a" * 32
    ours = {f"{name}@{digest[:12]}": f"/other-stage/{digest}/sql" for name in ("sql", "sql@v1", "team-b/sql")}
    others = {f"sql@{'0b' * 6}": f"/other-stage/{digest}/sql", f"law@{digest[:12]}": f"/models/{digest}/tax"}
    rig.engine.adapters = {**ours, **others}
    await rig.settle()
    listed = {str(card["id"]) for card in rig.replica.base_cards()}
    assert listed == {"tiny", *others}
    assert not any(map(rig.replica.passes_through, ours))


async def test_of_several_namespaces(make_rig: MakeRig) -> None:
    """The namespace stands in the name, registered or not."""
    adapters = {"a/x": "/x", "b/y@v2": "/y", "c/z": "/z", "sql": COPY + "sql", "own": "", "a@b": "/a"}
    assert await kept_to(make_rig(), adapters, "a", "b") == {
        "tiny": None,
        "none": None,
        "a/x": "a",
        "b/y@v2": "b",
        "c/z": None,
        "sql": UNKNOWN,
        "own": None,
        "a@b": None,
    }


async def test_a_revision_whose_name_has_no_pointer(make_rig: MakeRig) -> None:
    """It is known by its record, and by that alone."""
    rig = make_rig()
    rig.volume.put("sql", "v2")
    rig.volume.desired = replace(rig.volume.desired, pointers=no_pointers())
    told = await kept_to(rig, {"sql@v2": "/x", "sql@v3": "/x"})
    assert (told["sql@v2"], told["sql@v3"]) == ("default", None)


async def test_before_the_volume_was_read(make_rig: MakeRig) -> None:
    """Unknown is not nobody's: an adapter without a namespace in its name may be any of this one's."""
    rig = make_rig()
    rig.volume.read_once = False
    assert (await kept_to(rig, {"own": "/models/own"}))["own"] == "default"
    rig.volume.read_once = True
    assert rig.replica.kept_to("own") is None
