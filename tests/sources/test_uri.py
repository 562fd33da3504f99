"""A source taken apart, what of it may be shown, and what an operator allows."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.allowed import AllowedRemotes, is_public
from lora_fs.sidecar.sources.local import path_of
from lora_fs.sidecar.sources.offer import Offer, is_of
from lora_fs.sidecar.sources.uri import parse, redacted

SECRET = "hush4711"
DIGEST = "ab" * 32


@pytest.mark.parametrize(
    "text",
    [
        f"https://me:{SECRET}@models.example.com/a.tar",
        f"https://models.example.com/a.tar?X-Amz-Signature={SECRET}",
        f"https://{SECRET}@models.example.com/a.tar?sig={SECRET}#sha256={DIGEST}",
        f"hf://{SECRET}@org/a",
    ],
)
def test_secrets_are_not_shown(text: str) -> None:
    """Neither as it is taken apart nor as it is told where it cannot be."""
    assert SECRET not in str(parse(text)) + repr(parse(text)) + redacted(text)


@given(st.text(), st.text())
def test_any_text_is_taken_apart_or_refused(text: str, more: str) -> None:
    """There is no third way, and telling it never fails."""
    for one in (text, f"https://host/{text}", f"hf://{text}/{more}", f"{text}://{more}"):
        redacted(one)
        try:
            uri = parse(one)
        except InputError:
            continue
        assert ".." not in uri.path
        assert uri.request.isascii()
        assert parse(str(uri)) == parse(str(parse(str(uri))))


@pytest.mark.parametrize(
    "text",
    [
        "https://",
        "https:///a.tar",
        "https://h//a.tar",
        "https://h/../a.tar",
        "https://h/%2e%2e/a.tar",
        "https://h/%252e%252e/a.tar",
        "https://h/a%2fb.tar",
        "https://h/a\\b.tar",
        "https://h/a b.tar",
        "https://h/a.tar#sha256=12",
        "https://h/a.tar#other",
        "https://[h/a.tar",
        "https://[1:2:3]/a.tar",
        "oci://[10.0.0.7]/acme/sql:v1",
        "https://h:/a.tar",
        "https://h:99:9/a.tar",
        "no-uri",
        "https://h/" + "x" * 5000,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str) -> None:
    """A path that a server may read as another one than lora-fs compared is no path."""
    with pytest.raises(InputError):
        parse(text)


@pytest.mark.parametrize(
    "path", ["a/..%2fb", "a%2f%2e%2e%2fb", "a/%2e%2e%252fb", "%2e", "a/..;/b", "a/%2e%2e;v=1/b"]
)
def test_a_redirect_that_could_climb_is_refused(path: str) -> None:
    """A server writes its paths as it likes, but for those that another server may resolve."""
    with pytest.raises(InputError):
        parse(f"https://h/{path}/c.tar", redirect=True)


@pytest.mark.parametrize("scheme", ["http", "https", "oci"])
@pytest.mark.parametrize("place", ["host", "[::1]"])
def test_a_port_that_cannot_be_is_refused(scheme: str, place: str) -> None:
    """The system would ask another one: 99999 is 34463 there."""
    for port in ("0", "65536", "99999"):
        with pytest.raises(InputError, match=f"{port} is no port: write one from 1 to 65535"):
            parse(f"{scheme}://{place}:{port}/a")
    assert parse(f"{scheme}://{place}:65535/a").place == f"{place}:65535"


def test_aliases_and_default_ports() -> None:
    """They are one place by whatever name."""
    assert parse("HuggingFace://a/b") == parse("hf://a/b")
    assert parse("https://Host:443/a") == parse("https://host/a")
    assert parse(f"https://h/a.tar#sha256={DIGEST.upper()}").sha256 == DIGEST


ALLOWED = [
    ("*", "s3://any/thing", True),
    ("hf://", "hf://org/repo@v2/folder", True),
    ("hf://", "https://huggingface.co/org/repo", False),
    ("hf://org", "hf://org/repo", True),
    ("hf://org", "hf://organism/repo", False),
    ("hf://org/repo", "hf://org/repo@refs%2Fpr%2F1", True),
    ("hf://org/repo", "hf://org/repository", False),
    ("hf://org/repo@v1", "hf://org/repo@v2", False),
    ("https://models.example.com", "https://models.example.com/a.tar", True),
    ("https://models.example.com", "https://models.example.com.evil.org/a.tar", False),
    ("https://models.example.com", "https://models.example.com@evil.org/a.tar", False),
    ("https://models.example.com", "http://models.example.com/a.tar", False),
    ("https://models.example.com", "https://models.example.com:8443/a.tar", False),
    ("https://h/loras", "https://h/loras-private/a.tar", False),
    ("https://h/loras/", "https://h/loras/a.tar", True),
    ("https://h/loras", "https://h", False),
    ("s3://bucket/loras", "s3://bucket/loras/sql", True),
    ("s3://bucket/loras", "s3://bucket/lorasx", False),
    ("s3://bucket", "s3://bucket2/a", False),
]


@pytest.mark.parametrize(("prefix", "text", "covered"), ALLOWED)
def test_what_is_allowed(prefix: str, text: str, covered: bool) -> None:
    """Scheme, host and whole segments count, and never text alone."""
    allowed = AllowedRemotes(["gs://another", prefix])
    if covered:
        allowed.check(parse(text))
        return
    with pytest.raises(InputError, match="LORA_FS_ALLOWED_REMOTES"):
        allowed.check(parse(text))


def test_an_entry_admits_the_address_of_its_own_scheme_and_host() -> None:
    """An entry of the host by another scheme names another server."""
    allowed = AllowedRemotes(["*", "https://models.internal/loras"])
    allowed.check_address(parse("https://models.internal/else"), "10.0.0.7")
    for uri in ("http://models.internal/loras", "https://models.internal:8443/loras"):
        with pytest.raises(InputError, match="an address that is not public"):
            allowed.check_address(parse(uri), "10.0.0.7")


INSIDE = """
127.0.0.1 10.0.0.7 169.254.169.254 100.64.0.1 ::1 :: fe80::1 fe80::1%eth0 fd00::1 fec0::2 feff::1 ff0e::1
::127.0.0.1 ::8.8.8.8 ::ffff:10.0.0.7 ::ffff:0:10.0.0.7
224.0.0.1 168.63.129.16 192.0.0.192 ::ffff:168.63.129.16 2130706433 0x7f.1 127.1
64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::7f00:1 64:ff9b:1::808:808 64:ff9b:2::1
2002:7f00:1:: 2002:a00:7::1 2001:0:808:808::f5ff:fff8 2001:0:a00:7::f7f7:f7f7 2001:db8::1 5f00::1 100::1
"""
PUBLIC = "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808 2002:808:808::1 2001:0:808:808::f7f7:f7f7"


@pytest.mark.parametrize("address", INSIDE.split())
def test_an_address_inside_a_network_is_not_public(address: str) -> None:
    """Nor is one with such an IPv4 address in it, one of a range that nobody routes, or one where a cloud
    answers its machines. A proxy resolves names, so a number is an address in whatever form.
    """
    assert not is_public(address)


@pytest.mark.parametrize("address", PUBLIC.split())
def test_an_address_of_the_internet_is_public(address: str) -> None:
    """And one that is translated or tunnelled to one."""
    assert is_public(address)


def test_nothing_is_allowed_unless_it_is_said() -> None:
    """By default a request makes no replica fetch anything."""
    with pytest.raises(InputError):
        AllowedRemotes().check(parse("hf://org/repo"))


def test_a_claim_is_a_folder_where_it_is_mounted() -> None:
    """And one that is not known is told with those that are."""
    mounts = {"": Path("/adapters"), "team": Path("/mnt/team")}
    assert path_of("pvc://team/loras/a", mounts) == Path("/mnt/team/loras/a")
    assert path_of("pvc:///default/a", mounts) == Path("/adapters/default/a")
    with pytest.raises(InputError, match=r"not known here \(team\).*LORA_FS_PVC_MOUNTS"):
        path_of("pvc://other/a", mounts)
    for text in ("pvc://team/../a", "pvc://team/%2e%2e/a", "pvc://team"):
        with pytest.raises(InputError):
            path_of(text, mounts)


def test_what_is_not_shown_has_an_identity() -> None:
    """Of the query and the user; not of the password, and not of what signs a query anew."""
    alike = "https://host/a.tar"
    ones = [
        alike,
        f"{alike}?id=1",
        f"{alike}?id=2",
        f"{alike}?id=1&id=2",
        "https://me@host/a.tar",
        "https://me@host/a.tar?id=1",
        "https://you@host/a.tar",
    ]
    identities = [parse(one).identity for one in ones]
    assert (identities[0], len(set(identities))) == ("", len(ones))
    assert {str(parse(one)) for one in ones} == {alike}
    for one, same in (
        (f"{alike}?X-Amz-Signature=a&x-amz-date=b&X-Goog-Expires=1", alike),
        (f"{alike}?id=1&X-Amz-Signature=a", f"{alike}?id=1"),
        (f"{alike}#sha256={'0' * 64}", alike),
        ("https://me:hush4711@host/a.tar", "https://me@host/a.tar"),
        ("https://HOST:443/a.tar?id=1", f"{alike}?id=1"),
        ("hf://me@acme/sql", "hf://acme/sql"),
    ):
        assert parse(one).identity == parse(same).identity


@pytest.mark.parametrize("behind", ["npm/x@1/a.tar", "@scope/a.tar", "a.tar?mail=me@h", "a.tar#x@y"])
@pytest.mark.parametrize("place", ["host", "host:8443", "[::1]"])
def test_an_at_behind_the_host_is_written_as_40(place: str, behind: str) -> None:
    """It may be the end of a password with a ``/``; so what is kept of a URL is what is shown of it."""
    text = f"https://{place}/{behind}"
    with pytest.raises(InputError, match="%40"):
        parse(text)
    if "#" not in behind:
        quoted = text.replace("@", "%40")
        assert str(parse(quoted)) == redacted(quoted) == quoted.partition("?")[0]
    assert parse(f"https://{place}/x@1/a.tar", redirect=True).path == ("x@1", "a.tar")


@pytest.mark.parametrize(
    ("pin", "asked", "same"),
    [
        (None, "", True),
        (None, "?id=1", False),
        ('"x"', "", True),
        ('"x"', "?id=1", False),
        ('"x"', f"#sha256={'0' * 64}", True),
        ("sha256:" + "0" * 64, f"?id=1#sha256={'0' * 64}", True),
        ("sha256:" + "0" * 64, f"#sha256={'1' * 64}", False),
        ("sha256:" + "0" * 64, "", True),
        ("sha256:" + "0" * 64, "?id=1", False),
    ],
)
def test_what_is_pinned_so_may_be_of_it(pin: str | None, asked: str, same: bool) -> None:
    """Of records of before there were marks, too."""
    uri = parse(f"https://host/a.tar{asked}")
    assert is_of(pin, uri) == same
    if not uri.sha256:
        marked = Offer(str(uri), pin, ()).marked(uri).recorded
        assert is_of(marked, uri)
        assert is_of(marked, parse("https://host/a.tar?id=2")) is False
