"""The hub, as huggingface_hub's own client sees it: commits, folders, LFS behind a redirect, tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.registry.conftest import write_adapter
from tests.sources.conftest import CONFIG, WEIGHTS, Hub, LoraFs, left_in
from tests.sources.test_web import record

OLD, NEW = "a" * 40, "b" * 40


def test_the_commit_is_the_pin(lora_fs: LoraFs, hub: Hub, adapter: Path, root: Path) -> None:
    """What main was when it was asked; the record says which commit, and nothing of how it was got."""
    hub.publish(adapter, OLD)
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": "hf://acme/sql-lora", "pin": OLD}
    assert (root / "default/tiny/v1/sql" / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    assert left_in(root) == []
    assert "secret4711" not in str(record(lora_fs)) + ran.err


def test_a_commit_that_is_registered_is_not_fetched_again(
    lora_fs: LoraFs, hub: Hub, adapter: Path, root: Path
) -> None:
    """The hub is asked what main is; under another name the files are taken from the volume."""
    hub.publish(adapter, OLD)
    assert lora_fs("register", "sql", "hf://acme/sql-lora").code == 0
    sent = hub.web.sent
    assert "unchanged" in lora_fs("register", "sql", "huggingface://acme/sql-lora").out
    assert lora_fs("register", "other", "hf://acme/sql-lora").code == 0
    assert [path for path, _, _ in hub.web.asked if "/lfs/" in path][1:] == []
    assert hub.web.sent - sent < 4096
    assert record(lora_fs, "other")["digest"] == record(lora_fs)["digest"]


def test_a_new_commit_is_a_new_revision(lora_fs: LoraFs, hub: Hub, adapter: Path, tmp_path: Path) -> None:
    """And the old one can be asked for by its hash."""
    hub.publish(adapter, OLD)
    assert lora_fs("register", "sql", "hf://acme/sql-lora").code == 0
    hub.publish(write_adapter(tmp_path / "second", seed=2), NEW)
    ran = lora_fs("register", "sql", f"hf://acme/sql-lora@{NEW}")
    assert ran.out == "registered sql@v2 in default/tiny\n", ran.err


def test_a_folder_of_a_repository(lora_fs: LoraFs, hub: Hub, adapter: Path) -> None:
    """Its files alone; the root holds none, and that is said."""
    hub.publish(adapter, OLD, under="adapters/sql/")
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "no adapter lies there" in ran.err) == (2, True), ran.err
    assert lora_fs("register", "sql", "hf://acme/sql-lora@main/adapters/sql").code == 0


def test_a_revision_with_slashes(lora_fs: LoraFs, hub: Hub, adapter: Path) -> None:
    """As it is written on the hub, and as a URL has it."""
    hub.publish(adapter, OLD)
    hub.refs["refs/pr/1"] = OLD
    assert lora_fs("register", "sql", "hf://acme/sql-lora@refs/pr/1").code == 0
    assert lora_fs("register", "two", "hf://acme/sql-lora@refs%2Fpr%2F1").code == 0


def test_the_token_stays_with_the_hub(
    lora_fs: LoraFs, hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent to the hub, and not to where the hub redirects; it is in no record and no output."""
    monkeypatch.setenv("HF_TOKEN", "hf_hush4711")
    hub.publish(adapter, OLD)
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "hush4711" in ran.out + ran.err + str(record(lora_fs))) == (0, False), ran.err
    sent = {who for path, _, who in hub.web.asked if "/resolve/" in path}
    assert sent == {"Bearer hf_hush4711"}
    assert {who for path, _, who in hub.web.asked if path.startswith("/lfs/")} == {None}


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_a_file_that_is_not_the_commits_is_refused(
    name: str, lora_fs: LoraFs, hub: Hub, adapter: Path, root: Path
) -> None:
    """By the SHA-256 that the hub has of the weights, and by the git hash of the config."""
    hub.publish(adapter, OLD)
    (path,) = [one for one in hub.web.files if one.endswith(name) or ("/lfs/" in one and name == WEIGHTS)]
    data = hub.web.files[path]
    hub.web.files[path] = data[:-1] + bytes([data[-1] ^ 1])
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, f"{name} is not the file it has to be" in ran.err) == (2, True), ran.err
    assert left_in(root) == []


@pytest.mark.parametrize(
    ("uri", "code", "why"),
    [
        ("hf://acme/other", 3, "no such repository, or it is private: set HF_TOKEN"),
        ("hf://acme", 2, "write hf://org/repo"),
        (f"hf://acme/sql-lora#sha256={'0' * 64}", 2, "leave #sha256= out"),
    ],
)
def test_what_the_hub_does_not_have(uri: str, code: int, why: str, lora_fs: LoraFs, hub: Hub) -> None:
    """Is told in a sentence."""
    ran = lora_fs("register", "sql", uri)
    assert (ran.code, why in ran.err) == (code, True), ran.err


def test_a_hub_that_does_not_answer(lora_fs: LoraFs, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told as one, and not as a repository that is not there."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "the hub does not answer" in ran.err) == (1, True), ran.err


def test_a_connection_that_the_hub_has_closed(
    lora_fs: LoraFs, hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that was kept no answer comes: the hub is asked once more, and no oftener."""
    from huggingface_hub import HfApi

    hub.publish(adapter, OLD)
    asked, answer = list[str](), HfApi.model_info

    def closed(self: HfApi, repo: str, **options: Any) -> Any:
        asked.append(repo)
        if len(asked) == 1:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return answer(self, repo, **options)

    monkeypatch.setattr(HfApi, "model_info", closed)
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, len(asked)) == (0, 2), ran.err


def test_what_the_removed_sidecar_listed_is_fetched(
    lora_fs: LoraFs, hub: Hub, adapter: Path, tmp_path: Path
) -> None:
    """``import gie``: a source that is a repository is taken from the hub; a dry run fetches nothing."""
    hub.publish(adapter, OLD)
    listed = "{id: sql, source: acme/sql-lora, base-model: tiny}, {id: law, source: acme/law}"
    (tmp_path / "cm.yaml").write_text(f"vLLMLoRAConfig: {{ensureExist: {{models: [{listed}]}}}}")
    lora_fs("register", "other", str(adapter))
    ran = lora_fs("import", "gie", "cm.yaml", "--dry-run")
    assert f"would fetch  default/tiny: sql: hf://acme/sql-lora at {OLD}" in ran.out, ran.out
    assert not [path for path, _, _ in hub.web.asked if "/lfs/" in path]
    ran = lora_fs("import", "gie", "cm.yaml")
    assert ran.code == 1
    assert "registered   default/tiny: sql@v1" in ran.out
    assert "failed       law: hf://acme/law: the hub has no such repository" in ran.out
    assert record(lora_fs)["source"] == {"uri": "hf://acme/sql-lora", "pin": OLD}
