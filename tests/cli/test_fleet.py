"""register: what the live replicas say that they cannot serve, before anything is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_fs.sidecar.model import EngineLimits, Phase
from tests.cli.conftest import LoraFs

Folder = Callable[[int], str]
Report = Callable[..., None]

LOW = EngineLimits(max_lora_rank=2, runtime_loading=True)  # the adapters have rank 4
HIGH = EngineLimits(max_lora_rank=8, runtime_loading=True)


@pytest.mark.parametrize("words", [(), ("--dry-run",)], ids=["register", "dry run"])
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (LOW, "r: LoRA rank 4 is greater than max_lora_rank 2"),
        (EngineLimits(base_models=("acme/big",), strict_base_model=True), "the base model here is acme/big"),
        (
            EngineLimits(base_config={"model_type": "llama", "hidden_size": 8}),
            "the base model's layer takes 8",
        ),
        (EngineLimits(runtime_loading=False), "its engine can load no adapter"),
    ],
    ids=["rank", "base model", "base config", "runtime loading"],
)
def test_what_no_live_replica_can_serve_is_refused(
    lora_fs: LoraFs, folder: Folder, report: Report, limits: EngineLimits, why: str, words: tuple[str, ...]
) -> None:
    """Exit 5 with each replica's reason and the way past it; nothing is written. A rehearsal says it, too."""
    report("pod-a", limits=limits)
    report("pod-b", limits=LOW)
    report("gone", limits=HIGH, age_s=3600)
    ran = lora_fs("register", "a", folder(1), *words)
    assert ran.code == 5
    assert why in ran.err
    assert "pod-a" in ran.err
    assert "pod-b" in ran.err
    assert "gone" not in ran.err
    assert "--force" in ran.err
    assert lora_fs("list", "-o", "name").out == ""


def test_a_folder_is_validated_against_the_fleet(
    lora_fs: LoraFs, folder: Folder, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As register would judge it; where no base model is given, by the folder alone."""
    report("pod-a", limits=LOW)
    ran = lora_fs("validate", folder(1))
    assert ran.code == 5
    assert "pod-a cannot serve it" in ran.err
    monkeypatch.delenv("LORA_FS_MODEL")
    assert lora_fs("validate", folder(1)).code == 0


def test_an_import_asks_the_fleet(lora_fs: LoraFs, folder: Folder, report: Report, tmp_path: Path) -> None:
    """Of another system's adapters what no live replica can serve is refused; --force imports it."""
    shutil.copytree(folder(1), tmp_path / "store" / "a")
    report("pod-a", limits=LOW)
    words = ("import", "nim", str(tmp_path / "store"), "-o", "json")
    refused, forced = lora_fs(*words), lora_fs(*words, "--force")
    assert (refused.code, forced.code) == (1, 0)
    assert "pod-a cannot serve it" in refused.json["items"][0]["why"]
    assert forced.json["items"][0]["outcome"] == "registered"


def test_a_replica_that_refuses_changes_over_http_is_no_trouble(
    lora_fs: LoraFs, folder: Folder, report: Report
) -> None:
    """Status says that it has no token file, and exits 0: somebody may want it so."""
    assert lora_fs("register", "a", folder(1)).code == 0
    for changed_by, is_told in (("nobody", True), ("tokens", False)):
        report("pod-a", phases={"a": Phase.READY}, changed_by=changed_by)
        ran = lora_fs("status", "--exit-code")
        assert (ran.code, "has no token file" in ran.out) == (0, is_told)


def test_what_is_forced_is_registered(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The reasons are warnings then, in the result as well."""
    report("pod-a", limits=LOW)
    ran = lora_fs("register", "a", folder(1), "--force", "-o", "json")
    assert ran.code == 0
    (warning,) = ran.json["warnings"]
    assert (warning["code"], warning["severity"]) == ("no-replica", "warning")
    assert ran.json["record"]["spec"]["allowed"] == []
    assert "warning: .: pod-a cannot serve it" in lora_fs("register", "b", folder(2), "--force").out


def test_what_some_can_serve_is_registered(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """The warning names who cannot serve it."""
    report("low", limits=LOW)
    report("high", limits=HIGH)
    for words in ((), ("--dry-run",)):
        ran = lora_fs("register", "a", folder(1), *words)
        assert ran.code == 0
        assert "warning: .: low cannot serve it" in ran.out
        assert "high cannot" not in ran.out


@pytest.mark.parametrize("limits", [None, EngineLimits()], ids=["an earlier version", "nothing known"])
def test_unknown_limits_refuse_nothing(
    lora_fs: LoraFs, folder: Folder, report: Report, limits: EngineLimits | None
) -> None:
    """A replica that does not say what it can serve may serve it; with no live replica nothing is refused."""
    assert lora_fs("register", "a", folder(1)).code == 0
    report("low", limits=LOW)
    report("pod", limits=limits)
    assert lora_fs("register", "b", folder(2)).code == 0


def test_replicas_of_another_model_are_not_asked(lora_fs: LoraFs, folder: Folder, report: Report) -> None:
    """Only those that would serve the name are."""
    report("elsewhere", limits=LOW, namespaces=("team-b",))
    assert lora_fs("register", "a", folder(1)).code == 0
