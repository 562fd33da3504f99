"""Artifacts of a real OCI registry, as ORAS, ModelPack, KitOps and olot push them; and of hostile ones."""

from __future__ import annotations

import base64
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_fs.demo.process import LOCAL
from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.allowed import AllowedRemotes
from lora_fs.sidecar.sources.offer import Options
from lora_fs.sidecar.sources.remote.oci import manifest
from lora_fs.sidecar.sources.remote.oci.credentials import basic
from lora_fs.sidecar.sources.remote.oci.reference import reference
from lora_fs.sidecar.sources.remote.oci.source import Oci
from lora_fs.sidecar.sources.uri import parse, redacted
from tests.sources.conftest import CONFIG, WEIGHTS, Command, LoraFs, WebServer, left_in
from tests.sources.oci import (
    FILEPATH,
    TITLE,
    Artifact,
    digest_of,
    of_files,
    of_tar,
    of_tars,
    program,
    put_manifest,
    running,
)
from tests.sources.test_web import record

SECRET = "hush-4711"
TAR = "application/vnd.oci.image.layer.v1.tar"


@dataclass
class Served:
    """A real registry. ``data``: what it stores."""

    program: str
    host: str
    data: Path


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Anybody may push to it and pull from it."""
    folder = tmp_path_factory.mktemp("oci")
    found = program()
    with running(found, folder / "open", folder / "data") as host:
        yield Served(found, host, folder / "data")


def same_files(root: Path, adapter: Path, revision: str = "v1") -> bool:
    placed = root / f"default/tiny/{revision}/sql"
    return all((placed / name).read_bytes() == (adapter / name).read_bytes() for name in (CONFIG, WEIGHTS))


@pytest.mark.parametrize("whole", [False, True], ids=["files", "folder"])
def test_what_oras_pushes_is_pulled_by_tag_and_by_digest(
    whole: bool, lora_fs: LoraFs, served: Served, adapter: Path, root: Path
) -> None:
    """The pin is the manifest's digest; the digest names the same revision again."""
    import oras.client

    files = [str(adapter)] if whole else [str(path) for path in sorted(adapter.iterdir())]
    named = f"{served.host}/oras/{'folder' if whole else 'files'}"
    client = oras.client.OrasClient(hostname=served.host, insecure=True)
    pushed = client.push(target=f"{named}:v1", files=files, disable_path_validation=True)
    digest = pushed.headers["Docker-Content-Digest"]
    client.session.close()
    ran = lora_fs("register", "sql", f"oci://{named}:v1")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": f"oci://{named}:v1", "pin": digest}
    assert same_files(root, adapter)
    ran = lora_fs("register", "sql", f"oci://{named}@{digest}")
    assert (ran.code, "unchanged" in ran.out) == (0, True), ran.out + ran.err
    assert left_in(root) == []


LAYOUTS: dict[str, Callable[[Path], Artifact]] = {
    "ModelPack, raw": lambda one: of_files(one, "application/vnd.cncf.model.weight.v1.raw", FILEPATH),
    "ModelPack, a tar each": lambda one: of_tars(one, "application/vnd.cncf.model.weight.v1.tar"),
    "KitOps": lambda one: of_tar(one, "application/vnd.kitops.modelkit.model.v1.tar+gzip"),
    "olot": lambda one: of_tars(one, TAR, **{"olot.layer.content.type": "file"}),
    "an image": lambda one: of_tar(one, "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    "docker's manifest": lambda one: Artifact(
        *((TAR, path.read_bytes(), {TITLE: path.name}) for path in one.iterdir()),
        media_type=manifest.MANIFESTS[1],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_pulled(
    layout: str, lora_fs: LoraFs, served: Served, adapter: Path, root: Path
) -> None:
    """Files and tars give the bytes that were pushed."""
    repository = f"layout/l{list(LAYOUTS).index(layout)}"
    LAYOUTS[layout](adapter).push(served.host, repository, "v1")
    ran = lora_fs("register", "sql", f"oci://{served.host}/{repository}:v1")
    assert ran.code == 0, ran.err
    assert same_files(root, adapter)


def test_an_index_of_one_manifest_is_followed(
    lora_fs: LoraFs, served: Served, adapter: Path, root: Path
) -> None:
    """The pin is the digest of the index, which the URI names; attestations are left out."""
    artifact = of_files(adapter)
    base = f"http://{served.host}/v2/index/one"
    digest = artifact.push(served.host, "index/one", "plain")
    entry = {"mediaType": artifact.media_type, "digest": digest, "size": len(artifact.manifest)}
    attestation = {**entry, "annotations": {"vnd.docker.reference.type": "attestation-manifest"}}
    index = {"schemaVersion": 2, "mediaType": manifest.INDEXES[0], "manifests": [entry, attestation]}
    with httpx.Client(**LOCAL) as client:
        pin = put_manifest(client, base, "v1", json.dumps(index).encode(), manifest.INDEXES[0])
    ran = lora_fs("register", "sql", f"oci://{served.host}/index/one:v1")
    assert ran.code == 0, ran.err
    assert record(lora_fs)["source"] == {"uri": f"oci://{served.host}/index/one:v1", "pin": pin}
    assert same_files(root, adapter)


def test_a_tag_that_moved_is_another_revision(
    lora_fs: LoraFs, served: Served, adapter: Path, root: Path
) -> None:
    """What is registered keeps its bytes."""
    source = f"oci://{served.host}/moving/sql"  # latest
    of_files(adapter).push(served.host, "moving/sql", "latest")
    assert lora_fs("register", "sql", source).code == 0
    before = (root / "default/tiny/v1/sql" / CONFIG).read_bytes()
    config = json.loads((adapter / CONFIG).read_text()) | {"lora_alpha": 7}
    (adapter / CONFIG).write_text(json.dumps(config))
    of_files(adapter).push(served.host, "moving/sql", "latest")
    ran = lora_fs("register", "sql", source)
    assert (ran.code, "sql@v2" in ran.out) == (0, True), ran.out + ran.err
    assert same_files(root, adapter, "v2")
    assert (root / "default/tiny/v1/sql" / CONFIG).read_bytes() == before


def test_the_registry_sends_parts(served: Served, adapter: Path) -> None:
    """What a resumed fetch asks for is the part from there on."""
    of_files(adapter).push(served.host, "parts/sql", "v1")
    offer = Oci(parse(f"oci://{served.host}/parts/sql:v1"), Options()).look()
    (weights,) = [piece for piece in offer.pieces if piece.name == WEIGHTS]
    with weights.read(100, 200) as chunks:
        assert b"".join(chunks) == (adapter / WEIGHTS).read_bytes()[100:200]


def test_a_killed_pull_is_resumed(lora_fs: LoraFs, web: WebServer, large: Path, root: Path) -> None:
    """The next command asks for the rest alone."""
    source = of_files(large).serve(web, stall=6_000_000)
    first = Command("register", "sql", source)
    assert web.began.wait(30)
    (folder,) = until(lambda: list((root / "default/tiny/.incoming").glob("*/*.part.json")))[:1]
    assert folder.exists()
    first.kill()
    for odd in web.odd.values():
        odd.stall = None
    web.asked = []
    assert lora_fs("register", "sql", source).code == 0
    assert same_files(root, large)
    blob = f"/v2/acme/sql/blobs/{digest_of((large / WEIGHTS).read_bytes())}"
    (asked,) = web.bodies(blob)
    assert asked is not None
    assert int(asked.removeprefix("bytes=").partition("-")[0]) > 0
    assert left_in(root) == []


def until(found: Callable[[], list[Path]]) -> list[Path]:
    """What another process wrote, once it did."""
    end = time.monotonic() + 30
    while not (paths := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return paths


def test_bytes_of_another_digest_are_refused(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path
) -> None:
    """Of a blob, of a manifest that is asked for by its digest, and of one that is announced by another."""
    artifact = of_files(adapter)
    source = artifact.serve(web)
    by_digest = f"oci://127.0.0.1:{web.port}/acme/sql@{digest_of(artifact.manifest)}"
    blob = f"/v2/acme/sql/blobs/{digest_of((adapter / WEIGHTS).read_bytes())}"
    kept = web.files[blob]
    web.files[blob] = kept[:-1] + bytes([kept[-1] ^ 1])
    ran = lora_fs("register", "sql", source)
    assert (ran.code, "is not the file it has to be" in ran.err) == (2, True), ran.err
    web.files[blob] = kept
    where = f"/v2/acme/sql/manifests/{digest_of(artifact.manifest)}"
    web.files[where] = artifact.manifest + b" "
    ran = lora_fs("register", "sql", by_digest)
    assert (ran.code, "is asked for or announced" in ran.err) == (2, True), ran.err
    assert left_in(root) == []
    web.files[where] = artifact.manifest
    assert lora_fs("register", "sql", by_digest).code == 0


def hostile(change: Callable[[dict[str, Any]], Any]) -> Callable[[Artifact], bytes]:
    def made(artifact: Artifact) -> bytes:
        body = json.loads(artifact.manifest)
        changed = change(body)
        return json.dumps(body if changed is None else changed).encode()

    return made


def layer(number: int = 0, **fields: Any) -> Callable[[Artifact], bytes]:
    return hostile(lambda body: body["layers"][number].update(fields))


def titled(title: Any) -> Callable[[Artifact], bytes]:
    return layer(annotations={TITLE: title})


MANY = {"mediaType": "a/b", "digest": "sha256:" + "0" * 64, "size": 1}
NESTED = {"mediaType": manifest.INDEXES[0], "digest": "sha256:" + "0" * 64, "size": 1}
INDEX = {"schemaVersion": 2, "mediaType": manifest.INDEXES[0]}
PLAIN = {"mediaType": manifest.MANIFESTS[0], "digest": "sha256:" + "0" * 64, "size": 1}

HOSTILE: dict[str, tuple[Callable[[Artifact], bytes], str]] = {
    "huge": (lambda _: b" " * (manifest.MOST_BYTES + 1), "has more than"),
    "no JSON": (lambda _: b"<html>", "is no JSON"),
    "deep": (lambda _: b"[" * 100_000, "is no JSON"),
    "a list": (lambda _: b"[]", "no JSON object"),
    "a helm chart's index": (hostile(lambda body: body.update(mediaType="text/html")), "is a text/html"),
    "version 1": (hostile(lambda body: body.update(schemaVersion=1)), "version 2"),
    "no layers": (hostile(lambda body: body.update(layers=None)), "no list of layers"),
    "layers that are none": (hostile(lambda body: body.update(layers=[1])), "no list of layers"),
    "many layers": (hostile(lambda body: body.update(layers=[MANY] * 513)), "513 layers"),
    "nested index": (hostile(lambda _: {**INDEX, "manifests": [NESTED]}), "manifests alone"),
    "index of two": (
        hostile(lambda _: {**INDEX, "manifests": [PLAIN, {**PLAIN, "digest": "sha256:" + "1" * 64}]}),
        "lists 2 manifests",
    ),
    "index of none": (hostile(lambda _: {**INDEX, "manifests": []}), "lists 0 manifests"),
    "title that climbs": (titled(f"../../{CONFIG}"), "leaves its folder"),
    "title that is absolute": (titled(f"/etc/{CONFIG}"), "leaves its folder"),
    "title with a backslash": (titled(f"..\\{CONFIG}"), "leaves its folder"),
    "title with a NUL": (titled(f"a\0/{CONFIG}"), "leaves its folder"),
    "title that is no text": (titled(7), "no texts"),
    "two adapters": (titled(f"other/{CONFIG}"), "more than one adapter"),
    "the same file twice": (titled(WEIGHTS), "more than one adapter"),
    "no config": (titled("notes.txt"), f"{CONFIG} is missing"),
    "digest that is a path": (layer(digest="sha256:../../../../etc/passwd"), "no sha256 digest"),
    "digest of another kind": (layer(digest="sha512:" + "0" * 128), "no sha256 digest"),
    "negative size": (layer(size=-1), "no media type, or no size"),
    "size that is no number": (layer(size=True), "no media type, or no size"),
    "larger than allowed": (layer(size=1 << 50), "are the most that is fetched"),
    "zstd": (layer(mediaType="application/vnd.cncf.model.weight.v1.tar+zstd"), "zstd"),
    "tar that is none": (layer(mediaType="application/vnd.cncf.model.weight.v1.tar"), "is no tar"),
}


def test_a_readme_of_another_folder_is_left_out(web: WebServer, adapter: Path) -> None:
    """Only the adapter's own comes along; another one does not make two adapters of it."""
    files = [(path.read_bytes(), f"sql/{path.name}") for path in sorted(adapter.iterdir())]
    for readmes in (["README.md"], ["README.md", "sql/README.md"], ["sql/README.md", "docs/README.md"]):
        named = [*files, *((name.encode(), name) for name in readmes)]
        artifact = Artifact(*(("text/plain", data, {TITLE: title}) for data, title in named))
        offer = Oci(parse(artifact.serve(web)), Options()).look()
        own = [digest_of(b"sql/README.md")] if "sql/README.md" in readmes else []
        assert [f"sha256:{one.sha256}" for one in offer.pieces if one.name == "README.md"] == own


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_refused(
    case: str, lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path
) -> None:
    """With the reason, and nothing is left on the volume."""
    change, why = HOSTILE[case]
    artifact = of_files(adapter)
    source = artifact.serve(web)
    web.files["/v2/acme/sql/manifests/v1"] = change(artifact)
    ran = lora_fs("register", "sql", source)
    assert (ran.code != 0, why in ran.err) == (True, True), ran.err
    assert not list((root / "default/tiny").glob("v*"))


def test_tars_that_leave_their_folder_or_repeat_a_file_are_refused(
    lora_fs: LoraFs, web: WebServer, adapter: Path, root: Path
) -> None:
    """A tar of a layer is unpacked as any tar of unknown origin; two have no file in common."""
    from tests.sources.conftest import tar_of

    climbs = Artifact((TAR, tar_of(adapter, prefix="../"), {}))
    twice = Artifact((TAR, tar_of(adapter), {}), (TAR, tar_of(adapter, prefix="b/"), {}))
    for number, (artifact, why) in enumerate(((climbs, "leaves its folder"), (twice, "more than one"))):
        ran = lora_fs("register", "sql", artifact.serve(web, f"acme/t{number}"))
        assert (ran.code, why in ran.err) == (2, True), ran.err
    assert not list((root / "default/tiny").glob("v*"))


def test_a_redirect_gets_no_credentials(
    lora_fs: LoraFs, web: WebServer, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blobs may lie at another host; a password is sent only where it is asked for."""
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine 127.0.0.1 login me password {SECRET}\n")
    monkeypatch.setenv("LORA_FS_NETRC_FILE", str(netrc))
    source = of_files(adapter).serve(web)
    for path in [path for path in web.files if "/blobs/" in path]:
        web.put(path.replace("/v2/", "/stored/"), web.files[path])
        web.odd[path].location = f"http://localhost:{web.port}{path.replace('/v2/', '/stored/')}"
    web.odd["/v2/acme/sql/manifests/v1"].status = 401
    web.odd["/v2/acme/sql/manifests/v1"].fails = True
    web.odd["/v2/acme/sql/manifests/v1"].headers = {"WWW-Authenticate": 'Basic realm="r"'}
    assert lora_fs("register", "sql", source).code == 0
    sent = base64.b64encode(f"me:{SECRET}".encode()).decode()
    manifests = [one for path, _, one in web.asked if "/manifests/" in path]
    assert manifests == [None, f"Basic {sent}"]
    assert {one for path, _, one in web.asked if path.startswith("/stored/")} == {None}


# `hush-4711`, as htpasswd -B writes it
HTPASSWD = "me:$2y$05$abcdefghijklmnopqrstuuytUdDONscKfgoFg/VA/Ex24XapSEkgm\n"


@pytest.fixture
def auth_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Writes docker's config.json with one password."""

    def write(host: str, password: str) -> None:
        auth = base64.b64encode(f"me:{password}".encode()).decode()
        (tmp_path / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        monkeypatch.setenv("LORA_FS_REGISTRY_AUTH_FILE", str(tmp_path / "config.json"))

    return write


def test_a_registry_that_wants_a_password_gets_it(
    lora_fs: LoraFs,
    served: Served,
    adapter: Path,
    root: Path,
    tmp_path: Path,
    auth_file: Callable[[str, str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From docker's config.json; it is in no record, output or log."""
    caplog.set_level(logging.DEBUG)
    of_files(adapter).push(served.host, "private/sql", "v1")
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = {"htpasswd": {"realm": "r", "path": str(tmp_path / "htpasswd")}}
    with running(served.program, tmp_path / "basic", served.data, auth=auth) as host:
        source = f"oci://{host}/private/sql:v1"
        ran = lora_fs("register", "sql", source)
        assert (ran.code, "LORA_FS_REGISTRY_AUTH_FILE" in ran.err) == (2, True), ran.err
        auth_file(host, "wrong")
        assert lora_fs("register", "sql", source).code == 2
        auth_file(host, SECRET)
        ran = lora_fs("register", "sql", source)
    assert ran.code == 0, ran.err
    assert same_files(root, adapter)
    told = ran.out + ran.err + caplog.text + "".join(path.read_text() for path in root.rglob("*.json"))
    assert SECRET not in told
    assert base64.b64encode(f"me:{SECRET}".encode()).decode() not in told


@pytest.mark.parametrize("name", ["docker.io", "index.docker.io", "registry-1.docker.io"])
@pytest.mark.parametrize("key", ["https://index.docker.io/v1/", "docker.io", "docker.io/acme"])
def test_docker_hub_by_each_of_its_names(
    name: str, key: str, auth_file: Callable[[str, str], None], tmp_path: Path
) -> None:
    """Only one of them answers. Docker and podman write its password beside another."""
    auth_file(key, SECRET)
    base = reference(parse(f"oci://{name}/acme/sql:v1")).base
    assert str(base) == "https://registry-1.docker.io"
    found = basic(base.place, "acme/sql", Options(registry_auth_file=tmp_path / "config.json"))
    assert found == f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"


def test_a_registry_that_wants_a_token_gets_one(
    lora_fs: LoraFs,
    served: Served,
    web: WebServer,
    adapter: Path,
    root: Path,
    tmp_path: Path,
    auth_file: Callable[[str, str], None],
) -> None:
    """The password goes to the server of tokens, which is asked for pull of this repository alone."""
    of_files(adapter).push(served.host, "tokens/sql", "v1")
    token, certificate = signed_token("tokens/sql")
    (tmp_path / "root.pem").write_bytes(certificate)
    auth = {
        "token": {
            "realm": f"{web.url}/token",
            "service": "registry",
            "issuer": "tests",
            "rootcertbundle": str(tmp_path / "root.pem"),
        }
    }
    web.api = lambda path: {"token": token} if path.startswith("/token") else None
    with running(served.program, tmp_path / "bearer", served.data, auth=auth) as host:
        auth_file(host, SECRET)
        ran = lora_fs("register", "sql", f"oci://{host}/tokens/sql:v1")
    assert ran.code == 0, ran.err
    assert same_files(root, adapter)
    sent = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"
    assert web.asked[0] == ("/token?service=registry&scope=repository:tokens/sql:pull", None, sent)


def signed_token(repository: str) -> tuple[str, bytes]:
    """A token as the registry's specification has it, and the certificate that it is checked with."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import padding, rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    der = certificate.public_bytes(serialization.Encoding.DER)
    header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(der).decode()]}
    at = int(now.timestamp())
    claims = {
        "iss": "tests",
        "aud": "registry",
        "sub": "me",
        "exp": at + 600,
        "nbf": at - 60,
        "iat": at - 60,
        "jti": "1",
        "access": [{"type": "repository", "name": repository, "actions": ["pull"]}],
    }
    parts = [base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in (header, claims)]
    signature = key.sign(b".".join(parts), padding.PKCS1v15(), hashes.SHA256())
    token = b".".join((*parts, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()
    return token, certificate.public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize(
    "text",
    [
        "oci://registry.example/",
        "oci://registry.example/Upper/case:v1",
        "oci://registry.example/a:b:c",
        "oci://registry.example/a@sha256:12",
        "oci://registry.example/a@sha512:" + "0" * 128,
        "oci://registry.example/a?x=1",
        "oci://registry.example/../a:v1",
        f"oci://me:{SECRET}@registry.example/a:v1",
        f"oci://me:pa/{SECRET}@registry.example/a:v1",
        "oci://registry example/a:v1",
    ],
)
def test_what_names_no_artifact_is_refused(text: str) -> None:
    """Nothing is asked of the network, and a password is not shown."""
    with pytest.raises(InputError) as refused:
        Oci(parse(text), Options())
    assert SECRET not in str(refused.value) + redacted(text)


def test_an_artifact_is_shown_with_its_digest_and_allowed_by_its_repository() -> None:
    """An entry without a tag covers every tag and digest of its repository, and no other repository."""
    uri = parse(f"oci://Registry.example:443/acme/sql:v1@sha256:{'ab' * 32}")
    assert str(uri) == redacted(str(uri)) == f"oci://registry.example/acme/sql:v1@sha256:{'ab' * 32}"
    for entry in ("oci://", "oci://registry.example", "oci://registry.example/acme/sql", "*"):
        AllowedRemotes([entry]).check(uri)
    for entry in ("oci://registry.example/acme/sq", "oci://registry.example/acme/sql:v2", "https://"):
        with pytest.raises(InputError, match="LORA_FS_ALLOWED_REMOTES"):
            AllowedRemotes([entry]).check(uri)
