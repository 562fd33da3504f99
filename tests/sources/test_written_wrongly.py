"""Sources with a secret in them that are written a little wrongly: no part of it comes back, anywhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError, LoraFsError
from lora_fs.sidecar.model import JsonObject
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.sources.local import resolve
from lora_fs.sidecar.sources.uri import parse, redacted
from tests.cli.conftest import LoraFs, lora_fs, root
from tests.security.conftest import OPERATORS, bearer, token_file
from tests.server.conftest import tenants

__all__ = ["lora_fs", "root", "token_file"]

PARTS = ("HUSH", "ZQXJ")
SECRET = "".join(PARTS)
SPLIT = {mark: mark.join(PARTS) for mark in "/?#@\\"}

# What the source is, and what may be told of it.
WRONG = {
    f" https://me:{SECRET}@h/a.tar?X-Amz-Signature={SECRET}": "https://h/a.tar",
    f"\nhttps://me:{SECRET}@h/a.tar": "https://h/a.tar",
    f"\ufeffhttps://me:{SECRET}@h/a.tar": "\ufeffhttps://h/a.tar",
    f"https:/me:{SECRET}@h/a.tar?sig={SECRET}": "https:/h/a.tar",
    f"https:///me:{SECRET}@h/a.tar": "https:///h/a.tar",
    f"https://me:{SPLIT['/']}@h/a.tar": "https://…h/a.tar",
    f"https://me:{SPLIT['?']}@h/a.tar": "https://…",
    f"https://me:{SPLIT['#']}@h/a.tar": "https://…",
    f"https://me:{SPLIT['@']}@h/a.tar": "https://h/a.tar",
    f"https://me:12/{SECRET}@h/a.tar": "https://…h/a.tar",
    f"https://me:12?{SECRET}@h/a.tar": "https://…",
    f"https://me:{SECRET}@h\\@x/a?b": "https://x/a",
    f"https://me:{SPLIT['/']}": "https://…",
    f"https://h/a.tar?sig={SPLIT['@']}": "https://…",
    f"oci://me:{SPLIT['/']}@h/a": "oci://…h/a",
    f"s3://AKIAX:{SPLIT['/']}@bucket/key": "s3://…bucket/key",
    f"s3://AKIAX:{SECRET}@bucket/key": "s3://bucket/key",
    f"s3://AKIAX:{SECRET}": "s3://…",
    f"s3://AKIAX:{SPLIT['/']}": "s3://…",
    f"s3:/AKIAX:{SPLIT['/']}@bucket/key": "s3:/…bucket/key",
    f"s3://bucket/AKIAX:{SECRET}@key": "s3://…key",
    f"gcs://me:{SECRET}": "gs://…",
    f"hf://me:{SECRET}@org/repo": "hf://org/repo",
    f"hf://me:{SECRET}@org/repo@v1": "hf://…v1",
    f"hf://me:{PARTS[0]}@e/{PARTS[1]}@org/repo": "hf://…org/repo",
    f"hf://me:{SPLIT['/']}@org/repo": "hf://…org/repo",
    f"hf://org/me:{SECRET}@repo": "hf://…repo",
    f"file://me:{SECRET}@host/a": "file://host/a",
    f"file://me:{SPLIT['/']}@host/a": "file://…host/a",
    f"file:///me:{SECRET}@host/a": "file:///host/a",
    f"pvc://me:{SECRET}@claim/a": "pvc://claim/a",
    f"me:{SECRET}@https://h/a": "…://h/a",
}

AS_THEY_ARE = [
    "hf://org/repo@v2/folder",
    "hf://org/repo@refs%2Fpr%2F1",
    "s3://bucket/loras@v2/a",
    "https://h:8443/a.tar",
    "https://[::1]:8443/a.tar",
    "file:///home/me@corp/lora",
    "/home/me@corp/lora",
    "/data/run:/a@b",
    "models:/sql@champion",
    "org/repo",
    "name-for-the-downloader",
]


def hushed(text: str) -> bool:
    return not any(part in text.upper() for part in PARTS)


def fetched(text: str) -> bool:
    """Whether it can be taken apart and names another machine."""
    try:
        return parse(text).scheme not in ("file", "pvc")
    except InputError:
        return False


@pytest.mark.parametrize("text", WRONG)
def test_nothing_secret_is_told(text: str) -> None:
    """Neither by who shows it, nor where it is taken apart or refused, nor where it is taken for a folder."""
    assert redacted(text) == WRONG[text]
    for ask in (parse, resolve):
        try:
            told = str(ask(text))
        except LoraFsError as error:
            told = str(error)
        assert hushed(told), told


@pytest.mark.parametrize("text", AS_THEY_ARE)
def test_what_has_no_secret_is_told_whole(text: str) -> None:
    """The ``@`` of a revision, of an object and of a folder is none of a password."""
    assert redacted(text) == text


@example("hf", "@e/", "")
@given(
    st.sampled_from(["https", "s3", "hf", "file", "oci"]), st.text("me:/?#@ ", max_size=8), st.text("/h@?#")
)
def test_a_password_with_any_marks_in_it(scheme: str, marks: str, behind: str) -> None:
    """Whatever stands around it: what is before an ``@`` or behind a ``?`` or ``#`` is not told."""
    assert hushed(redacted(f"{scheme}://me:{PARTS[0]}{marks}{PARTS[1]}@{behind}"))
    assert hushed(redacted(f"{scheme}://h/a?{PARTS[0]}{marks}{PARTS[1]}{behind}"))


def test_blanks_around_a_source_are_none_of_it() -> None:
    """As they come along when it is copied."""
    assert parse("\n https://h/a.tar ") == parse("https://h/a.tar")


@pytest.mark.parametrize(
    "text",
    [
        "s3://key@bucket/a",
        "gs://me:word@bucket/a",
        "s3://key:word",
        "s3://key:wo/rd@bucket/a",
        "s3://bucket/key:word@a",
        "hf://me:wo/rd@org/repo",
        "hf://org/me:word@repo",
        "hf://-/repo",
        "https://me:12/34@h/a",
        "https://h:8443/@scope/a.tar",
        "https://me/word@h/a.tar",
        "https://me?word@h/a.tar",
        "https://me#word@h/a.tar",
    ],
)
def test_what_may_be_a_password_is_refused(text: str) -> None:
    """A bucket and an organisation have no user; a port may be the beginning of a password."""
    with pytest.raises(InputError):
        parse(text)


def test_over_http(tmp_path: Path, token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is in no answer, log, audit line or event, and in no file of the volume."""
    caplog.set_level(logging.DEBUG)
    told: list[str] = []
    with tenants(tmp_path, Admin(token_file, ("-",))) as http:
        headers = bearer(OPERATORS)
        for number, text in enumerate(WRONG):
            name = f"team-a/a{number}"
            ones: dict[str, JsonObject] = {
                "/v1/load_lora_adapter": {"lora_name": name, "lora_path": text},
                "/v1/loras": {"lora_name": name, "source": {"uri": text}},
            }
            for path, body in ones.items():
                answer = http.post(path, json=body, headers=headers)
                assert answer.status_code in (400, 404), (text, answer.text)
                told.append(answer.text)
        told += [http.get(path, headers=headers).text for path in ("/v1/events", "/v1/lora_adapters")]
    told += [path.read_text() for path in (tmp_path / "volume").rglob("*") if path.is_file()]
    assert caplog.text.count('"act": "register"') == 2 * len(WRONG)
    for one in (*told, caplog.text):
        assert hushed(one), one


def test_by_command(lora_fs: LoraFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not printed, and not told to the audit."""
    monkeypatch.setenv("LORA_FS_AUDIT_FILE", str(tmp_path / "audit"))
    wrong = [text for text in WRONG if not fetched(text)]
    for text in wrong:
        for command in (["register", "a", text], ["import", "gie", "c.yaml", "--folder", f"org/a={text}"]):
            (tmp_path / "c.yaml").write_text(
                "vLLMLoRAConfig: {ensureExist: {models: [{id: a, base-model: tiny, source: org/a}]}}"
            )
            done = lora_fs(*command)
            assert done.code != 0
            assert hushed(done.out + done.err), done.err
    audit = (tmp_path / "audit").read_text()
    assert audit.count("\n") >= len(wrong)
    assert hushed(audit), audit
