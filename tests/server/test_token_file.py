"""A token file that cannot be used is told before anybody needs it, and until it can be."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from fastapi import HTTPException
from starlette.datastructures import Headers

from lora_fs.sidecar.server.middleware import access, tokens
from lora_fs.sidecar.server.middleware.access import Admin
from lora_fs.sidecar.server.middleware.tokens import MAX_FILE_BYTES

pytestmark = pytest.mark.anyio

SECRET = "s3cr3t"
BOUND_S = 60


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def until(admin: Admin, told: bool) -> None:
    async with asyncio.timeout(BOUND_S):
        while bool(admin.conditions()) is not told:  # noqa: ASYNC110 - nothing tells when it has looked
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "the token file cannot be read: No such file or directory"),
        (None, "the token file cannot be read: it is not a regular file"),
        (f"{SECRET} verbs=all\n".encode(), "the token file is not valid: line 1: verbs= takes"),
        (f"{SECRET}\xe9\n".encode("latin-1"), "the token file is not text"),
        (f"{SECRET}\n".encode(), None),
    ],
    ids=["missing", "a FIFO", "malformed", "no text", "good"],
)
async def test_what_is_wrong_is_a_condition(tmp_path: Path, content: bytes | None, why: str | None) -> None:
    """Before the first call, by the line and never by what is in it; calls are still refused."""
    file = tmp_path / "tokens"
    if content is not None:
        file.write_bytes(content)
    if why is not None and "regular" in why:
        os.mkfifo(file)
    admin = Admin(file, ("-",))
    await admin.look()
    told = admin.conditions()
    assert [one.startswith(f"AdminToken: {file}: {why}") for one in told] == [True] * (why is not None)
    assert SECRET not in "".join(told)
    if why is not None:
        with pytest.raises(HTTPException) as refused:
            await admin.sight(Headers({access.HEADER: SECRET}))
        assert refused.value.status_code == 503


async def test_it_is_told_as_it_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation that went wrong is told without a call, and so is that it was mended."""
    monkeypatch.setattr(access, "LOOK_S", 0.02)
    file = tmp_path / "tokens"
    file.write_text(f"{SECRET}\n")
    admin = Admin(file)
    await admin.look()
    async with admin.watching():
        assert admin.conditions() == ()
        file.write_text("\N{SNOWMAN}\n")
        await until(admin, True)
        file.write_text(f"{SECRET}\n")
        await until(admin, False)


async def test_a_secret(tmp_path: Path) -> None:
    """Kubernetes mounts it as links, which it turns to another folder when the Secret changes."""
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "tokens").write_text(version)
    data, file = tmp_path / "..data", tmp_path / "tokens"
    data.symlink_to("one")
    file.symlink_to("..data/tokens")
    admin = Admin(file, ("-",))
    for version in ("one", "two"):
        data.unlink()
        data.symlink_to(version)
        await admin.look()
        assert admin.conditions() == ()
        assert await admin.sight(Headers({access.HEADER: version})) == access.ALL


async def test_no_token_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is looked at."""
    monkeypatch.setattr(access, "LOOK_S", 0.0)
    admin = Admin(None)
    await admin.look()
    async with admin.watching():
        await asyncio.sleep(0.01)
    assert admin.conditions() == ()


async def test_what_is_public_without_a_token_file() -> None:
    """A key of the engine's own is no token, as there are none: what is public is seen, and no more."""
    engines_own = Headers({"authorization": "Bearer sk-engine"})
    assert await Admin(None, ("a",)).sight(engines_own) == access.Sight(frozenset({"a"}))
    assert await Admin(None).sight(engines_own) == access.ALL


@pytest.mark.parametrize("more", [0, 1])
async def test_a_token_file_is_bounded(tmp_path: Path, more: int) -> None:
    """To the byte: one that is longer is not read in part, since a token might be cut in two."""
    file = tmp_path / "tokens"
    file.write_text(f"{SECRET}\n#".ljust(MAX_FILE_BYTES + more, "#"))
    admin = Admin(file, ("-",))
    await admin.look()
    if more:
        assert f"it has more than {MAX_FILE_BYTES} bytes" in admin.conditions()[0]
        with pytest.raises(HTTPException) as refused:
            await admin.sight(Headers({access.HEADER: SECRET}))
        assert refused.value.status_code == 503
    else:
        assert admin.conditions() == ()
        assert await admin.sight(Headers({access.HEADER: SECRET})) == access.ALL


async def test_a_file_is_parsed_once_for_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with a wrong token parse no 10,000 lines each, and other requests go on beside the first."""
    parse, threads = tokens.parse, list[int]()

    def parsed(text: str) -> object:
        threads.append(threading.get_ident())
        return parse(text)

    monkeypatch.setattr(tokens, "parse", parsed)
    file = tmp_path / "tokens"
    file.write_text("".join(f"token-{number} name=t{number}\n" for number in range(10_000)))
    admin = Admin(file, ("-",))
    for _ in range(20):
        await admin.look()
    assert len(threads) == 1
    file.write_text(f"{SECRET}\n")
    await admin.look()
    assert await admin.sight(Headers({access.HEADER: SECRET}))
    assert len(threads) == 2
    assert threading.get_ident() not in threads
