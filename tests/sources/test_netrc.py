"""The netrc file: whose password it gives to whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.passwords import of_netrc
from lora_fs.sidecar.sources.remote.web import Web
from lora_fs.sidecar.sources.uri import parse
from tests.sources.conftest import LoraFs, WebServer, tar_of
from tests.sources.oci import of_files


@pytest.mark.parametrize("entry", ["default", "machine localhost"])
def test_the_netrc_file_is_read_for_the_sources_own_host(
    entry: str, web: WebServer, adapter: Path, tmp_path: Path
) -> None:
    """Never for the target of a redirect; and an entry that names no host gives its password to none."""
    (tmp_path / "netrc").write_text(f"{entry} login me password hush4711\n")
    web.put("/away.tar", b"", location=f"http://localhost:{web.port}/elsewhere.tar")
    web.put("/elsewhere.tar", tar_of(adapter))
    Web(parse(f"{web.url}/away.tar"), Options(netrc_file=tmp_path / "netrc")).look()
    assert [(path, who) for path, _, who in web.asked] == [("/away.tar", None), ("/elsewhere.tar", None)]


@pytest.mark.parametrize(
    ("machine", "place", "found"),
    [
        ("models.example.com", "models.example.com", True),
        ("models.example.com", "models.example.com:8443", True),
        ("models.example.com", "example.com", False),
        ("::1", "[::1]:8443", True),
        ("::1", "[::1]", True),
        ("default", "default", False),
    ],
)
def test_the_netrc_file_names_hosts(machine: str, place: str, found: bool, tmp_path: Path) -> None:
    """Whatever the port. A host that is called `default` does not have the entry without a host."""
    (tmp_path / "netrc").write_text(f"machine {machine} login me password hush4711\n")
    assert (of_netrc(place, tmp_path / "netrc") == "me:hush4711") is found


@pytest.mark.parametrize("challenge", ['Basic realm="r"', 'Bearer realm="{}/token",service="s"'])
def test_a_password_for_no_host_goes_to_no_registry(
    challenge: str,
    lora_fs: LoraFs,
    web: WebServer,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A netrc's `default` is for every host, so also for the server of tokens that any registry names."""
    (tmp_path / "netrc").write_text("default login me password hush4711\n")
    monkeypatch.setenv("LORA_FS_NETRC_FILE", str(tmp_path / "netrc"))
    source = of_files(adapter).serve(web)
    manifest = web.odd["/v2/acme/sql/manifests/v1"]
    manifest.status, manifest.fails = 401, True
    manifest.headers = {"WWW-Authenticate": challenge.format(f"http://localhost:{web.port}")}
    web.api = lambda path: {"token": "t"} if path.startswith("/token") else None
    lora_fs("register", "sql", source)
    assert {who for _, _, who in web.asked} <= {None, "Bearer t"}


@pytest.mark.parametrize("data", [b"machine h login \xff password x\n", b"machine", b"login"])
def test_a_netrc_file_that_cannot_be_read_is_named(data: bytes, tmp_path: Path) -> None:
    """Whatever is wrong with it, and without a word of what it holds."""
    (tmp_path / "netrc").write_bytes(data)
    with pytest.raises(InputError, match=f"^the netrc file {tmp_path}/netrc cannot be read$"):
        of_netrc("h", tmp_path / "netrc")
