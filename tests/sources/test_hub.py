"""The hub, as huggingface_hub's own client sees it: commits, folders, LFS behind a redirect, tokens."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from lora_fs.sidecar.errors import InputError, SourceUnavailable
from lora_fs.sidecar.sources.known import opened
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.receive import transfer
from lora_fs.sidecar.sources.remote import hub as hub_module
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


@pytest.mark.parametrize(
    ("token", "sent"), [("hf_hush4711", "Bearer hf_hush4711"), (None, "Basic bWU6aHVzaA==")]
)
def test_the_token_is_sent_rather_than_the_netrc_files_password(
    lora_fs: LoraFs,
    hub: Hub,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    sent: str,
) -> None:
    """An entry for the hub's host counts where there is no token."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hush\n")
    monkeypatch.setenv("LORA_FS_NETRC_FILE", str(tmp_path / "netrc"))
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.publish(adapter, OLD)
    assert lora_fs("register", "sql", "hf://acme/sql-lora").code == 0
    assert {who for path, _, who in hub.web.asked if not path.startswith("/lfs/")} == {sent}


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


@pytest.mark.parametrize(
    ("status", "code", "rc", "why"),
    [
        (401, "GatedRepo", 2, "hf://acme/sql-lora is gated: accept its terms on the hub, and set HF_TOKEN"),
        (403, "GatedRepo", 2, "hf://acme/sql-lora is gated: accept its terms on the hub, and set HF_TOKEN"),
        (401, None, 2, f"hf://acme/sql-lora: {CONFIG} may not be read with a request without a token (401)"),
        (404, "EntryNotFound", 3, f"hf://acme/sql-lora: {CONFIG}: the hub has no such file (404)"),
    ],
)
def test_a_file_that_the_hub_refuses(
    status: int, code: str | None, rc: int, why: str, lora_fs: LoraFs, hub: Hub, adapter: Path
) -> None:
    """Is told as the hub's, also where it let the repository be listed."""
    hub.publish(adapter, OLD)
    odd = hub.web.odd[f"/acme/sql-lora/resolve/{OLD}/{CONFIG}"]
    odd.status, odd.headers = status, {"X-Error-Code": code} if code else {}
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, why in ran.err, "NETRC" in ran.err) == (rc, True, False), ran.err


def test_a_store_that_refuses_what_the_hub_redirects_to(lora_fs: LoraFs, hub: Hub, adapter: Path) -> None:
    """It is no fault of the token; nothing of the signature is told."""
    hub.publish(adapter, OLD)
    (path,) = [one for one in hub.web.files if one.startswith("/lfs/")]
    hub.web.odd[path].status = 403
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    told = f"{WEIGHTS}: http://localhost:{hub.web.port}, where the hub sends for it, refuses it (403)"
    assert (ran.code, told in ran.err, "4711" in ran.err) == (2, True, False), ran.err


@pytest.mark.parametrize(
    ("status", "message", "token", "why"),
    [
        (401, "Invalid credentials in Authorization header", "hf_no", "the hub refuses this token (401)"),
        (403, "", "hf_no", "the hub refuses this token (403)"),
        (403, "", None, "the hub refuses a request without a token (403)"),
        (403, "Access to this resource is disabled.", None, "the hub has disabled this repository"),
    ],
)
def test_a_hub_that_refuses_the_token(
    status: int,
    message: str,
    token: str | None,
    why: str,
    lora_fs: LoraFs,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does not help to ask again."""
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.web.put("/api/models/acme/sql-lora", b"", status=status, headers={"X-Error-Message": message})
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, why in ran.err) == (2, True), ran.err


@pytest.mark.parametrize(
    "body", [b"<html>welcome</html>", b"\xff\xfe", b"[]", b"{}", b'{"id": "a/b", "siblings": 3}']
)
def test_what_answers_is_no_hub(body: bytes, lora_fs: LoraFs, hub: Hub) -> None:
    """A page, or JSON of something else."""
    hub.web.put("/api/models/acme/sql-lora", body)
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    told = f"http://127.0.0.1:{hub.web.port} did not answer as a hub: is HF_ENDPOINT right?"
    assert (ran.code, told in ran.err) == (1, True), ran.err


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("hf://acme/sql-lora", "the repository has no main branch"),
        ("hf://acme/sql-lora@v9", "the repository has no revision 'v9'"),
    ],
)
def test_a_revision_that_is_not_there(uri: str, why: str, lora_fs: LoraFs, hub: Hub) -> None:
    """Is named if one was asked for."""
    for path in ("/api/models/acme/sql-lora", "/api/models/acme/sql-lora/revision/v9"):
        hub.web.put(path, b"", status=404, headers={"X-Error-Code": "RevisionNotFound"})
    ran = lora_fs("register", "sql", uri)
    assert (ran.code, why in ran.err, "None" in ran.err) == (3, True, False), ran.err


def test_checkpoints_in_folders_alone(lora_fs: LoraFs, hub: Hub, adapter: Path) -> None:
    """Some of them are named, as they are written behind the source."""
    folders = []
    for step in (10, 20, 30, 40, 50):
        hub.publish(adapter, OLD, under=f"runs/checkpoint-{step}/")
        folders += hub.siblings
    hub.siblings = [{"rfilename": "runs/notes/README.md", "size": 1}, *folders]
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    told = "it holds folders alone; one lies in each of its folders runs/checkpoint-10, runs/checkpoint-20, "
    assert (ran.code, told in " ".join(ran.err.split()), "notes" in ran.err) == (2, True, False), ran.err
    ran = lora_fs("register", "sql", "hf://acme/sql-lora/runs")
    assert "checkpoint-40 and others" in " ".join(ran.err.split()), ran.err
    assert "folders checkpoint-10, " in " ".join(ran.err.split()), ran.err
    assert lora_fs("register", "sql", "hf://acme/sql-lora/runs/checkpoint-20").code == 0


@pytest.mark.timeout(60)
def test_a_size_below_zero_is_none(
    lora_fs: LoraFs, hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is read to its end, as where none is said."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "10")
    hub.publish(adapter, OLD)
    for one in hub.siblings:
        one["size"] = -5
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("size", [None, 0])
@pytest.mark.parametrize("dated", [False, True])
def test_a_hub_that_says_when_to_ask_again(
    dated: bool, size: int | None, lora_fs: LoraFs, hub: Hub, adapter: Path
) -> None:
    """Is asked then, and not before; also for a file whose size it did not say."""
    hub.publish(adapter, OLD)
    path = f"/acme/sql-lora/resolve/{OLD}/{CONFIG}"
    if size is None:
        for one in hub.siblings:
            one["size"] = None
    odd, times, api = hub.web.odd[path], list[float](), hub.web.api
    odd.status, odd.fails = 429, True

    def noted(asked: str) -> Any:
        if asked == path:
            times.append(time.monotonic())
            then = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
            odd.headers = {"Retry-After": then if dated else "1"}
        return api(asked)

    hub.web.api = noted
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, len(times)) == (0, 2), ran.err
    assert times[1] - times[0] >= 1


@pytest.mark.parametrize("status", [429, 503, 500])
def test_a_hub_that_puts_off_a_look(status: int, hub: Hub) -> None:
    """It is asked once; who asked is told when to come back, where that is what the header is for."""
    hub.web.put("/api/models/acme/sql-lora", b"", status=status, headers={"Retry-After": "7"})
    with (
        opened("hf://acme/sql-lora", Options()) as source,
        pytest.raises(SourceUnavailable, match=f"the hub answered {status}") as refused,
    ):
        source.look()
    assert refused.value.retry_after_s == (SourceUnavailable.retry_after_s if status == 500 else 7.0)
    assert len(hub.web.asked) == 1


def test_a_wait_longer_than_the_fetch_may_take(
    lora_fs: LoraFs, hub: Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends with its time; a wait is bounded by MOST_WAIT_S besides."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "1")
    hub.publish(adapter, OLD)
    odd = hub.web.odd[f"/acme/sql-lora/resolve/{OLD}/{CONFIG}"]
    odd.status, odd.headers = 503, {"Retry-After": "86400"}
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "was not fetched in 1 s" in ran.err) == (1, True), ran.err
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "30")
    monkeypatch.setattr(transfer, "MOST_WAIT_S", 0.0)
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "tried 5 times" in ran.err) == (1, True), ran.err


def test_a_hub_that_does_not_answer(lora_fs: LoraFs, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so, and does not say that the repository is not there."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    ran = lora_fs("register", "sql", "hf://acme/sql-lora")
    assert (ran.code, "http://127.0.0.1:9 does not answer" in ran.err) == (1, True), ran.err


def test_a_list_of_files_without_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read up to a bound, and never unpacked."""
    monkeypatch.setattr(hub_module, "MOST_LISTED_BYTES", 1 << 16)
    for encoding, why in ((None, "has more than 65536 bytes"), ("gzip", "packs it on the way")):
        hub.web.put("/api/models/acme/sql-lora", b" " * (1 << 20), encoding=encoding)
        with opened("hf://acme/sql-lora", Options()) as source, pytest.raises(InputError, match=why):
            source.look()


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
