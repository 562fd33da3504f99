"""What is said of a registered name, and a revision that is tried: changed, and nothing else with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import Conflict, FormatTooNew, InputError, NotFound
from lora_fs.sidecar.model import AdapterKey, Policy, PolicyKind, Record, Scope
from lora_fs.sidecar.registry.format.layout import generation_name
from lora_fs.sidecar.registry.format.sealed import seal
from lora_fs.sidecar.registry.lifecycle import amend, release
from lora_fs.sidecar.registry.store.writer import Registry
from tests.registry.conftest import MakeAdapter, write_adapter
from tests.registry.test_operations import before_append, put, served

EAGER = Policy(kind=PolicyKind.EAGER, ttl_s=60, priority=7)
PINNED = amend.with_policy(Policy(), {"kind": "pinned"})


@pytest.fixture
def two(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> AdapterKey:
    """``a1`` serves v2 and has v1; the key of v1."""
    key = put(registry, scope, make_adapter(), policy=EAGER, labels={"team": "care", "old": "1"}).record.key
    put(registry, scope, make_adapter(seed=1))
    return key


def newest(registry: Registry, key: AdapterKey) -> Record:
    record = registry.latest(registry.records(key))[1]
    assert record is not None
    return record


def of_a_newer_writer(registry: Registry, key: AdapterKey) -> None:
    """The next generation of a record, as a later lora-fs would write it."""
    before = json.loads(newest(registry, key).model_dump_json())
    spec = {**before["spec"], "quantized": {"bits": 4}}
    spec["policy"] = {**(spec["policy"] or Policy().model_dump(mode="json")), "shard": "even"}
    body = {**before, "generation": before["generation"] + 1, "token": "newer", "spec": spec}
    path = registry.records(key).folder / generation_name(key.name, body["generation"])
    path.write_bytes(seal(body))


def test_a_policy_is_changed_and_nothing_else(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """Every revision has it, each as its next generation; all else is what it was."""
    before = newest(registry, two)
    changed = amend.amend(registry, scope, "a1", [PINNED], writer="test")
    assert [(one.revision, one.generation) for one in changed] == [("v1", 2), ("v2", 2)]
    record = newest(registry, two)
    assert record.spec.policy == EAGER.model_copy(update={"kind": PolicyKind.PINNED})
    assert record.spec.unpinned == EAGER
    assert record.spec.model_copy(update={"policy": EAGER, "unpinned": None}) == before.spec
    assert record.uid == before.uid
    assert served(registry, scope) == {"a1": "v2"}
    again = amend.amend(registry, scope, "a1", [PINNED], writer="test")
    assert [one.generation for one in again] == [2, 2]


def test_unpinned_it_is_what_it_was(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """The policy before it was pinned comes back, of each revision its own; without one, none."""
    v2 = two._replace(revision="v2")
    amend.amend(registry, scope, "a1", [amend.without_policy], writer="test", revision="v2")
    amend.amend(registry, scope, "a1", [PINNED], writer="test")
    amend.amend(registry, scope, "a1", [amend.with_policy(Policy(), {"priority": 9})], writer="test")
    amend.unpin(registry, scope, "a1", writer="test")
    assert newest(registry, two).spec.policy == EAGER
    assert newest(registry, v2).spec.policy is None


def test_labels_are_set_and_taken_away(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """One by one; what is not named stays."""
    change = amend.with_labels({"old": None, "stage": "prod", "never": None})
    amend.amend(registry, scope, "a1", [change], writer="test", revision="v1")
    assert newest(registry, two).spec.labels == {"team": "care", "stage": "prod"}
    assert newest(registry, two._replace(revision="v2")).spec.labels == {}


def test_on_the_condition_of_a_generation(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """Another one in force refuses, and so does a name of several revisions without one."""
    amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v1", expect=1)
    with pytest.raises(Conflict, match="expected generation 1, found 2"):
        amend.amend(registry, scope, "a1", [amend.without_policy], writer="test", revision="v1", expect=1)
    with pytest.raises(InputError, match="2 revisions"):
        amend.amend(registry, scope, "a1", [PINNED], writer="test", expect=1)
    with pytest.raises(NotFound):
        amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v9")


def test_what_was_withdrawn_meanwhile_stays_so(
    registry: Registry, scope: Scope, two: AdapterKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy does not bring a revision back."""

    def withdraw() -> None:
        release.unregister(registry, scope, "a1", revision="v1", writer="another")

    before_append(monkeypatch, withdraw, to="Record")
    with pytest.raises(Conflict, match="withdrawn meanwhile"):
        amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v1")
    assert not newest(registry, two).present


def test_fields_of_a_newer_writer_survive(
    registry: Registry, scope: Scope, two: AdapterKey, make_adapter: MakeAdapter
) -> None:
    """Through a change, through a withdrawal, and through registering the same bytes again."""
    of_a_newer_writer(registry, two)
    amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v1")
    release.unregister(registry, scope, "a1", revision="v1", writer="test")
    put(registry, scope, make_adapter(), revision="v1", policy=EAGER)
    spec = newest(registry, two).spec.model_dump(mode="json")
    assert spec["quantized"] == {"bits": 4}
    assert (spec["policy"]["kind"], spec["policy"]["shard"]) == ("eager", "even")
    assert spec["labels"] == {}


def test_a_generation_of_another_version_is_not_written_over(
    registry: Registry, scope: Scope, two: AdapterKey
) -> None:
    """Damage is written over; what a newer lora-fs wrote is refused with what to do."""
    path = registry.records(two).folder / generation_name("a1", 2)
    path.write_bytes(seal({"apiVersion": "lora-fs/v2", "shape": "another"}))
    with pytest.raises(FormatTooNew, match=r"lora-fs/v2.*upgrade"):
        amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v1")
    path.write_bytes(b"damage")
    assert amend.amend(registry, scope, "a1", [PINNED], writer="test", revision="v1")[0].generation == 3


def test_the_next_revision_keeps_the_policy(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """Of what the name serves, unless another one is said; labels are a revision's own."""
    put(registry, scope, make_adapter(), policy=EAGER, labels={"team": "care"})
    second = put(registry, scope, make_adapter(seed=1)).record
    assert (second.spec.policy, second.spec.labels) == (EAGER, {})
    lazy = Policy(kind=PolicyKind.LAZY)
    assert put(registry, scope, make_adapter(seed=2), policy=lazy, activate=False).record.spec.policy == lazy
    assert put(registry, scope, make_adapter(seed=3)).record.spec.policy == EAGER


def test_a_folder_with_other_bytes_keeps_what_was_said(registry: Registry, scope: Scope) -> None:
    """Its policy and labels are the revision's, whatever its files become."""
    folder = write_adapter(registry.layout.artifact(AdapterKey(*scope, "v1", "a1")))
    put(registry, scope, folder, revision="v1", origin="folder")
    label = amend.with_labels({"team": "care"})
    amend.amend(registry, scope, "a1", [PINNED, label], writer="test")
    write_adapter(folder, seed=1)
    record = put(registry, scope, folder, revision="v1", origin="folder").record
    assert record.generation == 3
    assert record.spec.labels == {"team": "care"}
    assert record.spec.policy is not None
    assert record.spec.policy.kind is PolicyKind.PINNED


# -- a revision that is tried --------------------------------------------------------------------


def tried(registry: Registry, scope: Scope) -> tuple[str, int] | None:
    pointer = release.active(registry, scope, "a1")
    assert pointer is not None
    return (pointer.canary.revision, pointer.canary.percent) if pointer.canary is not None else None


def test_a_trial_to_its_end(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """Begun, raised, lowered and finished; what served before is what a rollback goes back to."""
    for revision, percent in (("v1", None), ("v1", 5), (None, 50), (None, 20)):
        release.set_canary(registry, scope, "a1", revision, percent, writer="test")
        assert tried(registry, scope) == ("v1", percent or 0)
    assert served(registry, scope) == {"a1": "v2"}
    pointer = release.end_canary(registry, scope, "a1", finish=True, writer="test")
    assert (pointer.revision, pointer.previous_revision, pointer.canary) == ("v1", "v2", None)
    release.rollback(registry, scope, "a1", writer="test")
    assert served(registry, scope) == {"a1": "v2"}


def test_a_trial_that_is_ended(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """Aborted, or by another revision that is promoted, it is over, and there is nothing to end."""
    release.set_canary(registry, scope, "a1", "v1", 5, writer="test")
    pointer = release.end_canary(registry, scope, "a1", finish=False, writer="test")
    assert (pointer.revision, pointer.canary) == ("v2", None)
    release.set_canary(registry, scope, "a1", "v1", 5, writer="test")
    release.promote(registry, scope, "a1", "v1", writer="test")
    for act in (True, False):
        with pytest.raises(NotFound, match="no canary"):
            release.end_canary(registry, scope, "a1", finish=act, writer="test")


def test_what_cannot_be_tried(
    registry: Registry, scope: Scope, two: AdapterKey, make_adapter: MakeAdapter
) -> None:
    """What serves, what is not registered, a second one beside the first, and nothing at all."""
    with pytest.raises(NotFound, match="say which revision"):
        release.set_canary(registry, scope, "a1", None, 5, writer="test")
    with pytest.raises(InputError, match="serves v2 already"):
        release.set_canary(registry, scope, "a1", "v2", 5, writer="test")
    with pytest.raises(NotFound, match="no revision 'v9'"):
        release.set_canary(registry, scope, "a1", "v9", 5, writer="test")
    put(registry, scope, make_adapter(seed=2), activate=False)
    release.set_canary(registry, scope, "a1", "v1", 5, writer="test")
    with pytest.raises(Conflict, match="v1 answers 5 %"):
        release.set_canary(registry, scope, "a1", "v3", 5, writer="test")
    put(registry, scope, make_adapter(seed=3), name="silent", activate=False)
    with pytest.raises(NotFound, match="serves nothing"):
        release.set_canary(registry, scope, "silent", "v1", 5, writer="test")


def test_a_trial_goes_with_its_revision(registry: Registry, scope: Scope, two: AdapterKey) -> None:
    """Withdrawn, it answers nobody, and finishing it says so; the name serves on."""
    release.set_canary(registry, scope, "a1", "v1", 5, writer="test")
    release.unregister(registry, scope, "a1", revision="v1", writer="test")
    assert tried(registry, scope) is None
    assert served(registry, scope) == {"a1": "v2"}


def test_how_many_are_kept_survives_a_promotion(
    registry: Registry, scope: Scope, two: AdapterKey, tmp_path: Path
) -> None:
    """It is said of the name, whatever the name serves."""
    amend.keep_revisions(registry, scope, "a1", 3, writer="test")
    release.promote(registry, scope, "a1", "v1", writer="test")
    pointer = release.active(registry, scope, "a1")
    assert pointer is not None
    assert pointer.keep_revisions == 3
    assert amend.keep_revisions(registry, scope, "a1", 3, writer="test").generation == pointer.generation
    with pytest.raises(NotFound):
        amend.keep_revisions(registry, scope, "nobody", 3, writer="test")
