"""What live replicas cannot serve: refused where none can, told where some can."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_fs.sidecar.model import Severity
from lora_fs.sidecar.validate import Expectation, Peer, validate
from lora_fs.sidecar.validate.fleet import MAX_NAMED
from tests.validate.conftest import BASE_CONFIG, RANK, Draft

LOW = Expectation(max_rank=RANK - 1)
ANOTHER = Expectation(model_ids=("acme/other",))
NARROW = Expectation(base_config={**BASE_CONFIG, "hidden_size": 8})
ANYTHING = Expectation()


def said(folder: Path, *peers: Peer, **expected: object) -> list[tuple[str, Severity, str]]:
    """The findings on an adapter for a fleet of ``peers``."""
    report = validate(folder, replace(Expectation(fleet=peers), **expected))  # type: ignore[arg-type]
    return [(one.code, one.severity, one.message) for one in report.findings]


@pytest.mark.parametrize(
    ("judge", "loads", "why"),
    [
        (LOW, None, "LoRA rank 4 is greater than max_lora_rank 3"),
        (ANOTHER, True, "is acme/tiny-llama; the base model here is acme/other"),
        (NARROW, None, "the base model's layer takes 8"),
        (ANYTHING, False, "its engine can load no adapter"),
    ],
    ids=["rank", "base model", "shape", "no runtime loading"],
)
def test_what_no_replica_can_serve_is_refused(
    adapter: Path, judge: Expectation, loads: bool | None, why: str
) -> None:
    """The reason is the one that the replica itself would give."""
    ((code, severity, message),) = said(adapter, Peer("pod-a", judge, loads))
    assert (code, severity) == ("no-replica", Severity.ERROR)
    assert message.startswith("pod-a cannot serve it: ")
    assert why in message


def test_each_replica_has_its_reason(adapter: Path) -> None:
    """Those that judge alike are named together."""
    peers = (Peer("a", LOW), Peer("b", ANYTHING, False), Peer("c", LOW))
    first, second = said(adapter, *peers)
    assert first[2].startswith("a, c cannot serve it: adapter_config.json: r: LoRA rank 4 is")
    assert second[2].startswith("b cannot serve it: its engine can load no adapter")


def test_what_some_can_serve_is_told(adapter: Path) -> None:
    """Who cannot is named; a replica of which nothing is known may serve anything."""
    for other in (Peer("b", Expectation(max_rank=RANK)), Peer("b")):
        ((code, severity, message),) = said(adapter, Peer("a", LOW), other)
        assert (code, severity) == ("some-replicas", Severity.WARNING)
        assert message.startswith("a cannot serve it: ")


def test_nothing_is_told_where_nothing_is_known(adapter: Path) -> None:
    """Neither of no replica, nor of some that can or may serve it."""
    assert said(adapter) == []
    assert said(adapter, Peer("a"), Peer("b", Expectation(max_rank=RANK), True)) == []


def test_what_is_forced_is_told(adapter: Path) -> None:
    """The finding stays, as a warning."""
    ((code, severity, _),) = said(adapter, Peer("a", LOW), forced=True)
    assert (code, severity) == ("no-replica", Severity.WARNING)


def test_what_is_allowed_here_is_allowed_there(draft: Draft) -> None:
    """The record keeps it, and every replica goes by the record; its own allowance holds as well."""
    draft.config["base_model_name_or_path"] = "acme/other"
    draft.write()
    judge = Expectation(model_ids=("acme/tiny",))
    assert [code for code, _, _ in said(draft.folder, Peer("a", judge))] == ["no-replica"]
    assert said(draft.folder, Peer("a", judge), allow=frozenset({"base-model"})) == []
    assert said(draft.folder, Peer("a", replace(judge, allow=frozenset({"base-model"})))) == []


def test_a_pickle_is_allowed_by_each_replica_itself(draft: Draft) -> None:
    """No record makes a replica run the code in one."""
    weights = draft.write() / "adapter_model.safetensors"
    weights.rename(weights.with_name("adapter_model.bin"))
    allowed = frozenset({"pickle"})
    codes = [code for code, _, _ in said(draft.folder, Peer("a"), allow=allowed)]
    assert codes == ["pickle", "no-replica"]
    willing = Peer("a", Expectation(allow=allowed))
    assert [code for code, _, _ in said(draft.folder, willing, allow=allowed)] == ["pickle"]


def test_an_engine_that_is_too_old_cannot_serve_it(draft: Draft) -> None:
    """One whose version is not known may."""
    draft.config["rank_pattern"] = {"q_proj": RANK}
    draft.write()
    ((code, _, message),) = said(draft.folder, Peer("a", version="0.31.0"))
    assert (code, "engine-too-old" in message) == ("no-replica", True)
    assert said(draft.folder, Peer("a", version="0.32.0")) == said(draft.folder, Peer("a")) == []


def test_what_is_refused_here_is_not_asked_of_others(adapter: Path) -> None:
    """One reason is enough."""
    findings = said(adapter, Peer("a", LOW), max_rank=1)
    assert [code for code, _, _ in findings] == ["rank-too-high"]


def test_a_large_fleet_is_one_line(adapter: Path) -> None:
    """Of many replicas with one reason the first are named, and the others counted."""
    ((_, _, message),) = said(adapter, *(Peer(f"pod-{number:03}", LOW) for number in range(100)))
    assert message.count("pod-") == MAX_NAMED
    assert f"and {100 - MAX_NAMED} more cannot serve it" in message
