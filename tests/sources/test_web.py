"""A web server that stalls, cuts, redirects and lies; what is registered is what was meant, or nothing is."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_fs.sidecar.errors import InputError, SourceUnavailable
from lora_fs.sidecar.sources import offer
from lora_fs.sidecar.sources.allowed import AllowedRemotes
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.receive import transfer
from lora_fs.sidecar.sources.remote.web import Web
from lora_fs.sidecar.sources.uri import parse
from tests.sources.conftest import CONFIG, WEIGHTS, LoraFs, WebServer, left_in, tar_of


@contextmanager
def impatient() -> Iterator[None]:
    """Inside the block a download gives a silent server up after 0.3 s; a busy machine is as silent."""
    made, usual_s = offer.Options.__init__, offer.Options().stall_s
    with pytest.MonkeyPatch.context() as patch:
        sooner = tuple(0.3 if value is usual_s else value for value in made.__defaults__ or ())
        patch.setattr(made, "__defaults__", sooner)
        assert offer.Options().stall_s == 0.3
        yield


def record(lora_fs: LoraFs, name: str = "sql") -> dict[str, object]:
    shown = lora_fs("show", name, "-o", "json").json
    found: dict[str, object] = shown["revisions"][0]["spec"]
    return found


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_is_registered(mode: str, lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path) -> None:
    """Packed or not, with its etag for the pin; nothing else of it stays on the volume."""
    (adapter / "optimizer.pt").write_bytes(b"not wanted")
    url = web.put("/loras/sql.tar", tar_of(adapter, mode))
    ran = lora_fs("register", "sql", url)
    assert ran.code == 0, ran.err
    placed = root / "default/tiny/v1/sql"
    assert {path.name for path in placed.iterdir()} == {CONFIG, WEIGHTS}
    assert (placed / WEIGHTS).read_bytes() == (adapter / WEIGHTS).read_bytes()
    assert record(lora_fs)["source"] == {"uri": url, "pin": f'"{web_etag(web, "/loras/sql.tar")}"'}
    assert left_in(root) == []


def web_etag(web: WebServer, path: str) -> str:
    return hashlib.sha256(web.files[path]).hexdigest()[:32]


def test_weights_alone_take_the_config_beside_them(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """And without one it is said what to do."""
    url = web.put("/a/other-name.safetensors", (adapter / WEIGHTS).read_bytes())
    ran = lora_fs("register", "sql", url)
    assert (ran.code, f"no {CONFIG} lies beside it" in ran.err) == (3, True), ran.err
    web.put(f"/a/{CONFIG}", (adapter / CONFIG).read_bytes())
    assert lora_fs("register", "sql", url).code == 0


def test_the_sha256_is_compared(lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path) -> None:
    """Another file than the one that was meant leaves nothing behind."""
    data = tar_of(adapter)
    url = web.put("/sql.tar", data)
    ran = lora_fs("register", "sql", f"{url}#sha256={'0' * 64}")
    assert (ran.code, "is not the file it has to be" in ran.err) == (2, True), ran.err
    assert left_in(root) == []
    good = hashlib.sha256(data).hexdigest()
    assert lora_fs("register", "sql", f"{url}#sha256={good}").code == 0
    assert record(lora_fs)["source"] == {"uri": url, "pin": f"sha256:{good}"}


def test_plain_http_to_another_machine_needs_a_sha256(lora_fs: LoraFs) -> None:
    """Nothing is asked of it without."""
    ran = lora_fs("register", "sql", "http://models.example.com/a.tar")
    assert (ran.code, "#sha256=" in ran.err) == (2, True)


def test_it_goes_on_where_the_connection_was_cut(lora_fs: LoraFs, web: WebServer, large: Path) -> None:
    """The next request asks for the rest alone."""
    data = tar_of(large)
    url = web.put("/large.tar", data, cut=3_000_000)
    ran = lora_fs("register", "large", url)
    assert ran.code == 0, ran.err
    assert web.bodies("/large.tar") == [None, f"bytes=3000000-{len(data) - 1}"]


def test_it_begins_anew_where_parts_are_not_served(lora_fs: LoraFs, web: WebServer, large: Path) -> None:
    """A server without ranges sends all of it again, and it is whole."""
    url = web.put("/large.tar", tar_of(large), cut=3_000_000, ranged=False)
    assert lora_fs("register", "large", url).code == 0
    assert web.bodies("/large.tar") == [None, None]


def test_a_server_that_stalls_is_given_up_and_what_came_is_kept(
    lora_fs: LoraFs, web: WebServer, large: Path, root: Path
) -> None:
    """The next command asks for the rest alone."""
    data = tar_of(large)
    url = web.put("/large.tar", data, stall=4_000_000)
    with impatient():
        ran = lora_fs("register", "large", url)
    assert (ran.code, "it goes on from where it is" in ran.err) == (1, True), ran.err
    assert len(left_in(root)) == 1
    web.odd["/large.tar"].stall, web.asked = None, []
    assert lora_fs("register", "large", url).code == 0
    (asked,) = web.bodies("/large.tar")
    assert asked is not None
    assert int(asked.removeprefix("bytes=").partition("-")[0]) >= 4_000_000 * 0.9
    assert left_in(root) == []


def test_a_length_that_is_no_length(lora_fs: LoraFs, web: WebServer, large: Path) -> None:
    """A server that announces more than it has is told so, and nothing is registered."""
    url = web.put("/large.tar", tar_of(large), adds=1000)
    ran = lora_fs("register", "large", url)
    assert (ran.code, "fewer bytes than the" in ran.err) == (1, True), ran.err
    assert lora_fs("list", "-o", "json").json == []


def test_a_server_that_says_no_length(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """It is read to its end, and bounded as it is read."""
    url = web.put("/sql.tar", tar_of(adapter), lengthless=True, ranged=False)
    assert lora_fs("register", "sql", url).code == 0


@pytest.mark.parametrize(
    ("ranged", "headers"),
    [
        (False, {"Content-Length": "\xb2"}),
        (False, {"Content-Length": "1" * 5_000}),
        (True, {"Content-Range": f"bytes 0-0/{'1' * 5_000}"}),
    ],
)
def test_a_size_that_is_no_number(
    ranged: bool, headers: dict[str, str], lora_fs: LoraFs, web: WebServer, adapter: Path
) -> None:
    """A digit of another kind, or more of them than a number has: the size is not known."""
    url = web.put("/sql.tar", tar_of(adapter), lengthless=True, ranged=ranged, headers=headers)
    ran = lora_fs("register", "sql", url)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize("lengthless", [False, True])
def test_more_bytes_than_are_taken(
    lengthless: bool,
    lora_fs: LoraFs,
    web: WebServer,
    large: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before any is fetched where the size is said, and while it is read where it is not."""
    monkeypatch.setenv("LORA_FS_FETCH_MAX_BYTES", "1000000")
    url = web.put("/large.tar", tar_of(large), lengthless=lengthless, ranged=not lengthless)
    ran = lora_fs("register", "large", url)
    assert (ran.code, "LORA_FS_FETCH_MAX_BYTES" in ran.err) == (2, True), ran.err
    assert left_in(root) == []
    if not lengthless:
        assert web.bodies("/large.tar") == []


def test_too_slow(lora_fs: LoraFs, web: WebServer, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that drips for ever is given up when the time is over."""
    monkeypatch.setenv("LORA_FS_FETCH_TIMEOUT_S", "0.5")
    url = web.put("/large.tar", tar_of(large), pace=0.1)
    ran = lora_fs("register", "large", url)
    assert (ran.code, "LORA_FS_FETCH_TIMEOUT_S" in ran.err) == (1, True), ran.err


def test_a_file_that_is_replaced_meanwhile(
    lora_fs: LoraFs, web: WebServer, large: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Halves of two files never become one; what came of the first is removed."""
    url = web.put("/large.tar", tar_of(large), cut=3_000_000)

    def replaced(self: object, span: object, fd: object) -> None:
        web.odd["/large.tar"].etag = '"another"'
        return read(self, span, fd)  # type: ignore[arg-type]

    read = transfer._Fetch._read
    monkeypatch.setattr(transfer._Fetch, "_read", replaced)
    ran = lora_fs("register", "large", url)
    assert (ran.code, "was replaced while it was fetched" in ran.err) == (1, True), ran.err
    assert left_in(root) == []


def test_redirects_are_followed_within_reason(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """To http and https alone, and not for ever; the record names what was asked for."""
    stored = web.put("/stored/4711", tar_of(adapter))
    web.put("/latest.tar", b"", location=f"{stored}?X-Amz-Signature=hush")
    ran = lora_fs("register", "sql", f"{web.url}/latest.tar")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"]["uri"] == f"{web.url}/latest.tar"  # type: ignore[index]
    for target, why in ((f"{web.url}/loop.tar", "more than 5 times"), ("file:///etc/passwd", "alone")):
        web.put("/loop.tar", b"", location=target)
        ran = lora_fs("register", "sql", f"{web.url}/loop.tar")
        assert (ran.code, why in ran.err) == (2, True), ran.err


def test_a_redirect_to_what_has_an_at_in_it(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """Behind a host with a port, too: a server wrote it, and nobody can write it otherwise."""
    stored = web.put("/npm/sql@1.tar", tar_of(adapter))
    for number, target in enumerate(("/npm/sql@1.tar", f"{stored}?mail=me@h")):
        web.put("/latest.tar", b"", location=target)
        ran = lora_fs("register", f"sql-{number}", f"{web.url}/latest.tar?id={number}")
        assert ran.code == 0, ran.err
    assert "/npm/sql@1.tar?mail=me@h" in [path for path, _, _ in web.asked]


def test_a_url_of_any_letters(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """They are sent as a browser sends them, also where a redirect has them as they are."""
    web.put("/mod%C3%A8le.tar", tar_of(adapter))
    web.put("/latest.tar", b"", location="/mod\u00e8le.tar".encode().decode("latin-1"))
    for name, path in (("named", "/mod\u00e8le.tar?of=f\u00e9vrier 2026"), ("redirected", "/latest.tar")):
        ran = lora_fs("register", name, web.url + path)
        assert ran.code == 0, ran.err
    assert "/mod%C3%A8le.tar?of=f%C3%A9vrier%202026" in [path for path, _, _ in web.asked]


@pytest.mark.parametrize("target", ["/api/o/loras%2Fsql.tar?alt=media", "/bucket//sql.tar", "/download/sql/"])
def test_a_redirect_may_be_written_as_its_server_likes(
    target: str, lora_fs: LoraFs, web: WebServer, adapter: Path
) -> None:
    """Nobody who names a source can write it otherwise; a path ends in / where it does."""
    stored = web.put(target.partition("?")[0], tar_of(adapter))
    web.put("/latest.tar", b"", location=target)
    assert lora_fs("register", "redirected", f"{web.url}/latest.tar").code == 0
    if target.endswith("/"):
        assert lora_fs("register", "named", stored).code == 0


def test_a_redirect_leads_to_no_place_that_is_not_allowed(web: WebServer) -> None:
    """Each is asked of again, before it is connected to; its signature is not told."""
    web.put("/a.tar", b"", location=f"http://localhost:{web.port}/b.tar?sig=hush4711")
    web.put("/b.tar", b"x")
    options = Options(AllowedRemotes([web.url]).check)
    source = webs(f"{web.url}/a.tar", options)
    with pytest.raises(InputError, match=r"redirects to http://localhost:\d+/b.tar: .*not allowed") as told:
        source.look()
    assert "hush4711" not in str(told.value)
    assert [path for path, _, _ in web.asked] == ["/a.tar"]


@pytest.mark.parametrize("location", ["http://me:hush4711@[", "//me:hush4711@[x]/a"])
def test_a_redirect_to_no_url_is_refused(location: str, web: WebServer) -> None:
    """Nothing of it is shown: what stands before an @ may be a password."""
    web.put("/a.tar", b"", location=location)
    with pytest.raises(InputError, match=r"/a\.tar redirects to what is no URL") as refused:
        webs(f"{web.url}/a.tar", Options()).look()
    assert "hush4711" not in str(refused.value)


def webs(url: str, options: Options) -> Web:
    return Web(parse(url), options)


def test_credentials_go_to_their_host_alone(
    lora_fs: LoraFs, web: WebServer, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the URL or of the netrc file; they are in no record, no output and no request to another host."""
    password = base64.b64encode(b"me:hush4711").decode()
    url = web.put("/sql.tar", tar_of(adapter), password=password)
    assert "401" in lora_fs("register", "sql", url).err
    ran = lora_fs("register", "sql", url.replace("//", "//me:hush4711@"))
    assert (ran.code, "hush4711" in ran.out + ran.err) == (0, False), ran.err
    assert "hush4711" not in str(record(lora_fs))
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hush4711\n")
    monkeypatch.setenv("LORA_FS_NETRC_FILE", str(netrc))
    assert lora_fs("register", "two", url).code == 0
    web.put("/away.tar", b"", location=f"http://localhost:{web.port}/elsewhere.tar")
    web.put("/elsewhere.tar", tar_of(adapter))
    assert lora_fs("register", "three", f"{web.url}/away.tar".replace("//", "//me:hush4711@")).code == 0
    assert {who for path, _, who in web.asked if path == "/elsewhere.tar"} == {None}


def test_credentials_follow_a_redirect_of_their_host(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """To another path of it, or back to it; and to no other."""
    password = base64.b64encode(b"me:hush4711").decode()
    web.put("/old.tar", b"", location="/sql.tar")
    web.put("/sql.tar", tar_of(adapter), password=password)
    ran = lora_fs("register", "sql", f"{web.url}/old.tar".replace("//", "//me:hush4711@"))
    assert ran.code == 0, ran.err


def test_a_redirect_to_plain_http_needs_a_sha256(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As what is asked for does: nothing is asked of the other machine without."""
    web.put("/a.tar", b"", location="http://models.example.com/a.tar")
    with pytest.raises(InputError, match=r"redirects to http://models.example.com/a.tar: .*#sha256="):
        webs(f"{web.url}/a.tar", Options()).look()
    monkeypatch.setenv("http_proxy", web.url)  # which answers for every host
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    data = b"x" * 100
    web.put("http://models.example.com/a.tar", data)
    offered = webs(f"{web.url}/a.tar#sha256={hashlib.sha256(data).hexdigest()}", Options()).look()
    assert offered.size_bytes == len(data)


@pytest.mark.parametrize(
    ("odd", "code", "why"),
    [
        ({"status": 404}, 3, "no such file (404)"),
        ({"status": 403}, 2, "refuses it (403)"),
        ({"status": 503}, 1, "answered 503"),
        ({"status": 418}, 2, "answered 418"),
        ({"encoding": "gzip"}, 2, "packs it on the way"),
    ],
)
def test_what_a_server_refuses_is_told(
    odd: dict[str, object], code: int, why: str, lora_fs: LoraFs, web: WebServer
) -> None:
    """In a sentence, with the exit code of its kind."""
    ran = lora_fs("register", "sql", web.put("/sql.tar", b"x" * 100, **odd))
    assert (ran.code, why in ran.err) == (code, True), ran.err


def test_a_server_that_says_when_to_ask_again(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """Is asked then, and not before."""
    url = web.put("/sql.tar", tar_of(adapter), headers={"Retry-After": "1"})

    def busy_once(_: str) -> None:
        web.odd["/sql.tar"].status = 429 if len(web.asked) == 2 else None

    web.api = busy_once
    begun = time.monotonic()
    ran = lora_fs("register", "sql", url)
    assert (ran.code, len(web.asked)) == (0, 3), ran.err
    assert time.monotonic() - begun >= 1


@pytest.mark.parametrize(
    ("told", "seconds"),
    [
        ("9" * 400, offer.MOST_RETRY_S),
        ("86400", offer.MOST_RETRY_S),
        ("Fri, 31 Dec 9999 23:59:59 GMT", offer.MOST_RETRY_S),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("120", 120.0),
        ("soon", SourceUnavailable.retry_after_s),
    ],
)
def test_how_long_a_server_may_put_it_off(told: str, seconds: float, web: WebServer) -> None:
    """Whatever it says, up to an hour, and in a number that can be told on."""
    url = web.put("/a.tar", b"", status=429, headers={"Retry-After": told})
    with pytest.raises(SourceUnavailable) as refused:
        webs(url, Options()).look()
    assert refused.value.retry_after_s == seconds
    assert len(web.asked) == 1


def test_nobody_answers(lora_fs: LoraFs) -> None:
    """A closed port is told as one, at once."""
    ran = lora_fs("register", "sql", "http://127.0.0.1:9/sql.tar")
    assert (ran.code, "does not answer: Connection refused" in ran.err) == (1, True), ran.err


def test_an_adapter_that_cannot_be_served_is_refused_and_removed(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path
) -> None:
    """The usual validation, as of a folder, told of the source: where it was unpacked is gone."""
    (adapter / CONFIG).write_text('{"peft_type": "LORA"}')
    uri = web.put("/sql.tar", tar_of(adapter))
    ran = lora_fs("register", "sql", uri)
    assert (ran.code, f"{uri} cannot be served" in ran.err) == (5, True), ran.err
    assert left_in(root) == []


def test_a_dry_run_changes_nothing(lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path) -> None:
    """It is fetched to this machine, checked and forgotten."""
    lora_fs("register", "other", str(adapter))
    before = sorted(root.rglob("*"))
    ran = lora_fs("register", "sql", web.put("/sql.tar", tar_of(adapter)), "--dry-run")
    assert (ran.code, ran.out) == (0, "would register sql@v1 in default/tiny\n"), ran.err
    assert sorted(root.rglob("*")) == before


def test_a_dry_run_tells_the_pin_that_is_recorded(lora_fs: LoraFs, web: WebServer, adapter: Path) -> None:
    """Where nothing pins the bytes it tells the source from others, as the record does."""
    url = web.put("/sql.tar", tar_of(adapter), etag="") + "?id=1"
    lora_fs("register", "other", str(adapter))
    dry = lora_fs("register", "sql", url, "--dry-run", "-o", "json").json["record"]["spec"]["source"]
    assert lora_fs("register", "sql", url).code == 0
    assert dry == record(lora_fs)["source"]
    assert dry["pin"].startswith("url:")


def test_a_link_to_what_is_elsewhere_makes_no_sense(lora_fs: LoraFs, web: WebServer) -> None:
    """It is said before anything is asked."""
    ran = lora_fs("register", "sql", f"{web.url}/sql.tar", "--link")
    assert (ran.code, "--link refers to a folder" in ran.err, web.asked) == (2, True, [])
