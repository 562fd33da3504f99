"""Whether bytes are signed by someone who may: every byte counts, and so does who signed it."""

from __future__ import annotations

import base64
import datetime
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from lora_fs.sidecar.errors import InputError, TrustUnreadable
from lora_fs.sidecar.registry.lifecycle.artifacts import SERVED, hash_files
from lora_fs.sidecar.trust import BUNDLE, Refusal, Trust
from lora_fs.sidecar.trust.sign import sign
from tests.trust.conftest import DAY, UTC, Authority, Key, new_authority, new_key

Trusting = Callable[..., Trust]


def signed(folder: Path, key: Key) -> bytes:
    return sign(folder, key.pem, certificates=key.certificates)


def check(trust: Trust, folder: Path, raw: bytes | None, namespace: str = "default") -> str | None:
    return trust.check(namespace, hash_files(folder, SERVED), raw)


def refused(trust: Trust, folder: Path, raw: bytes | None, namespace: str = "default") -> Refusal:
    with pytest.raises(Refusal) as caught:
        check(trust, folder, raw, namespace)
    return caught.value


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()], ids=lambda c: c.name)
def test_a_key_signs(adapter: Path, trusting: Trusting, curve: ec.EllipticCurve) -> None:
    """A folder that a trusted key signed passes, and the signer is named."""
    key = new_key(curve)
    trust = trusting({"name": "ops", "key": key.public})
    who = check(trust, adapter, signed(adapter, key))
    assert who is not None
    assert who.startswith("ops (key ")


@pytest.mark.parametrize("below", [0, 1, 2])
def test_a_certificate_signs(adapter: Path, trusting: Trusting, below: int) -> None:
    """A folder passes that the holder of a certificate signed, with any issuers between it and the root."""
    root = new_authority()
    issuer: Authority = root
    for number in range(below):
        issuer = issuer.below(f"issuer {number}")
    trust = trusting({"name": "release", "certificates": root.pem})
    assert check(trust, adapter, signed(adapter, issuer.issue("build@acme"))) == (
        "release (certificate build@acme)"
    )


@pytest.mark.parametrize("how", ["key", "certificate"])
def test_every_byte_of_the_bundle_counts(adapter: Path, trusting: Trusting, how: str) -> None:
    """A bundle of which one bit is another one is refused, whichever bit it is."""
    root = new_authority()
    key = new_key() if how == "key" else root.below("issuer").issue("build@acme")
    method = {"key": key.public} if how == "key" else {"certificates": root.pem}
    trust, files = trusting({"name": "ops", **method}), hash_files(adapter, SERVED)
    raw = signed(adapter, key)
    assert trust.check("default", files, raw) is not None
    passed = []
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1 << (at % 8)
        try:
            trust.check("default", files, bytes(changed))
        except Refusal:
            continue
        passed.append(at)
    assert passed == []


def test_the_unused_bits_of_a_certificates_signature_count(adapter: Path, trusting: Trusting) -> None:
    """A certificate whose signature leaves a bit unused is another file, and refused as one.

    A signature that ends with a zero bit means the same without that bit, and the issuer does not sign how
    many bits there are.
    """
    root = new_authority()
    trust = trusting({"name": "ops", "certificates": root.pem})
    while True:
        key = root.issue("build@acme")
        raw = signed(adapter, key)
        bundle = json.loads(raw)
        (held,) = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"]
        der = bytearray(base64.b64decode(held["rawBytes"]))
        if not der[-1] & 1:
            break
    assert check(trust, adapter, raw) == "ops (certificate build@acme)"
    unused = len(der) - len(x509.load_der_x509_certificate(bytes(der)).signature) - 1
    assert der[unused] == 0
    der[unused] = 1
    held["rawBytes"] = base64.b64encode(der).decode()
    assert refused(trust, adapter, json.dumps(bundle).encode()).code == "untrusted"


def test_every_byte_of_the_config_and_the_model_counts(adapter: Path, trusting: Trusting) -> None:
    """A file of which one byte is another one is refused, whichever byte it is."""
    key = new_key()
    trust, raw = trusting({"name": "ops", "key": key.public}), signed(adapter, key)
    for name in SERVED:
        whole = (adapter / name).read_bytes()
        for at in range(0, len(whole), max(1, len(whole) // 500)):
            (adapter / name).write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
            assert refused(trust, adapter, raw).code == "signature-mismatch"
        (adapter / name).write_bytes(whole)
    assert check(trust, adapter, raw) is not None


def test_a_bundle_for_other_files(adapter: Path, trusting: Trusting, tmp_path: Path) -> None:
    """A trusted signature of other files is a mismatch, which names the file."""
    key, other = new_key(), tmp_path / "other"
    other.mkdir()
    (other / "README.md").write_text("hello")
    trust = trusting({"name": "ops", "key": key.public})
    refusal = refused(trust, adapter, signed(other, key))
    assert (refusal.code, str(refusal)) == ("signature-mismatch", "does not sign adapter_config.json")


def test_no_signature(adapter: Path, trusting: Trusting) -> None:
    """A folder without a bundle is unsigned, unless its namespace needs no signature."""
    trust = trusting({"name": "ops", "key": new_key().public}, unsigned=("playground",))
    assert refused(trust, adapter, None).code == "unsigned"
    assert check(trust, adapter, None, "playground") is None


def test_another_signer(adapter: Path, trusting: Trusting) -> None:
    """A key, or an authority, that the file does not name signs nothing."""
    trust = trusting(
        {"name": "ops", "key": new_key().public}, {"name": "release", "certificates": new_authority().pem}
    )
    for key in (new_key(), new_authority().issue("build@acme")):
        refusal = refused(trust, adapter, signed(adapter, key))
        assert refusal.code == "untrusted"
        assert "is by nobody who may sign in namespace default: ops, release" in str(refusal)


@pytest.mark.parametrize("methods", [*itertools.product(["key", "certificate"], repeat=2)], ids="-".join)
def test_either_of_two_signers(adapter: Path, trusting: Trusting, methods: tuple[str, str]) -> None:
    """Each of two signers can sign, in either order in the file; a damaged bundle of neither counts."""
    keys, signers = dict[str, Key](), list[dict[str, object]]()
    for name, method in zip(("alice", "bob"), methods, strict=True):
        root = new_authority(f"root of {name}")
        keys[name] = new_key() if method == "key" else root.issue(name)
        how = {"key": keys[name].public} if method == "key" else {"certificates": root.pem}
        signers.append({"name": name, **how})
    for order in itertools.permutations(signers):
        trust = trusting(*order)
        for name, key in keys.items():
            raw = signed(adapter, key)
            told = check(trust, adapter, raw)
            assert told is not None
            assert told.startswith(f"{name} (")
            value = json.loads(raw)
            value["dsseEnvelope"]["payload"] = base64.b64encode(b"{}").decode()
            why = str(refused(trust, adapter, json.dumps(value).encode()))
            assert "is damaged: its signature is not over what it says" in why
            assert all(one in why for one in keys)


def test_an_expired_certificate_of_one_of_two_signers(adapter: Path, trusting: Trusting) -> None:
    """One signer's reason and cure stand in the refusal, with the names of all signers that were asked."""
    root, now = new_authority(), datetime.datetime.now(UTC)
    raw = signed(adapter, root.issue("build@acme", begins=now - DAY / 2, ends=now - DAY / 4))
    signers = ({"name": "ops", "key": new_key().public}, {"name": "release", "certificates": root.pem})
    for order in itertools.permutations(signers):
        refusal = refused(trusting(*order), adapter, raw)
        assert "is by the certificate build@acme, which expired" in str(refusal)
        assert f"asked: {order[0]['name']}, {order[1]['name']}" in str(refusal)
        assert refusal.hint == "sign the folder again with a certificate that is valid"


def test_a_signer_of_another_namespace(adapter: Path, trusting: Trusting) -> None:
    """A signer signs in its own namespaces; where nobody may sign, nothing is trusted."""
    key = new_key()
    trust = trusting({"name": "ops", "key": key.public, "namespaces": ["team-a"]})
    assert check(trust, adapter, signed(adapter, key), "team-a") is not None
    assert "names no signer for namespace default" in str(refused(trust, adapter, signed(adapter, key)))


def test_a_subject(adapter: Path, trusting: Trusting) -> None:
    """Of an authority that certifies many, only the named one signs."""
    root = new_authority()
    trust = trusting({"name": "release", "certificates": root.pem, "subject": "release@acme"})
    assert check(trust, adapter, signed(adapter, root.issue("release@acme"))) is not None
    assert refused(trust, adapter, signed(adapter, root.issue("someone@acme"))).code == "untrusted"


@pytest.mark.parametrize("state", ["expired", "early"])
def test_a_certificate_that_is_not_valid_now(adapter: Path, trusting: Trusting, state: str) -> None:
    """A certificate that expired, or is not valid yet, signs nothing; the message says when it was valid."""
    root, now = new_authority(), datetime.datetime.now(UTC)
    begins, ends = (now - DAY, now - DAY / 2) if state == "expired" else (now + DAY / 4, now + DAY / 2)
    trust = trusting({"name": "release", "certificates": root.pem})
    key = root.issue("build@acme", begins=begins, ends=ends)
    refusal = refused(trust, adapter, signed(adapter, key))
    when, word = (ends, "expired") if state == "expired" else (begins, "is not valid before")
    assert f"is by the certificate build@acme, which {word} {when:%Y-%m-%d %H:%M} UTC" in str(refusal)
    assert refusal.code == "untrusted"


def test_a_certificate_beside_the_chain(adapter: Path, trusting: Trusting) -> None:
    """Each certificate of a bundle leads to the root: nothing vouches for another one's bytes."""
    root, key = new_authority(), new_authority().issue("someone")
    trust, own = trusting({"name": "release", "certificates": root.pem}), root.issue("build@acme")
    assert own.certificates is not None
    assert key.certificates is not None
    raw = signed(adapter, Key(own.private, own.certificates + key.certificates))
    assert "lead to no trusted authority" in str(refused(trust, adapter, raw))


def test_a_certificate_for_another_purpose(adapter: Path, trusting: Trusting) -> None:
    """A certificate that is not for signatures signs nothing."""
    root = new_authority()
    trust = trusting({"name": "release", "certificates": root.pem})
    assert "not one for signatures" in str(
        refused(trust, adapter, signed(adapter, root.issue("server", signs=False)))
    )


@pytest.mark.parametrize("text", ["", "signers: []\n", "{}\n"], ids=["empty", "none", "nothing"])
def test_an_empty_trust_file(adapter: Path, tmp_path: Path, text: str) -> None:
    """A trust file without a signer trusts nobody, and says so."""
    path = tmp_path / "trust.yaml"
    path.write_text(text)
    trust = Trust(path)
    assert refused(trust, adapter, signed(adapter, new_key())).code == "untrusted"
    assert f"the trust file {path} names no signer" in str(trust.problem())


WRONG = {
    "not YAML": ("signers: [\n", "line 1: not YAML"),
    "a list": ("- a\n", "line 1: is no mapping"),
    "an unknown field": (
        "signers:\n- name: a\n  keys: b\n",
        "line 3: signers[0].keys: there is no such field",
    ),
    "a key twice": ("signers:\n- name: a\n  key: x\n  key: y\n", "line 4: signers[0].key: this key is there"),
    "signers twice": ("signers: []\nsigners: []\n", "line 2: signers: this key is there twice"),
    "anchors that multiply": (
        "signers: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{b}: &{b} [{','.join(['*' + a] * 10)}]\n" for a, b in itertools.pairwise("abcdefg")),
        "its anchors written out",
    ),
    "no method": (
        "signers:\n- {name: a}\n",
        "line 2: signers[0]: give it one of key, certificates and identity",
    ),
    "two methods": ("signers:\n- {name: a, key: b, certificates: c}\n", "signers[0]: give it one of"),
    "half an identity": ("signers:\n- {name: a, identity: b}\n", "identity, issuer and trustedRoot"),
    "no such file": ("signers:\n- {name: a, key: nowhere.pub}\n", "nowhere.pub: "),
    "no key": ("signers:\n- {name: a, key: '-----BEGIN nothing'}\n", "signer a: its key is no public key"),
    "no certificate": (
        "signers:\n- {name: a, certificates: '-----BEGIN x'}\n",
        "signer a: its certificates are none in PEM",
    ),
    "two of a name": ("signers:\n- {name: a, key: x}\n- {name: a, key: y}\n", "two signers have one name"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_trust_file_that_is_wrong(adapter: Path, tmp_path: Path, what: str) -> None:
    """Nothing is trusted by it; the message names the file, the field or line, and what is wrong."""
    path, (text, why) = tmp_path / "trust.yaml", WRONG[what]
    path.write_text(text)
    with pytest.raises(TrustUnreadable) as caught:
        check(Trust(path), adapter, signed(adapter, new_key()))
    assert str(caught.value).startswith(f"the trust file {path}")
    assert why in str(caught.value)
    assert "nothing new is trusted" in str(caught.value)


def test_the_trust_file_is_read_live(adapter: Path, trusting: Trusting) -> None:
    """A key that is added counts at once; one that is taken away counts no more; nor does an absent file."""
    key = new_key()
    raw = signed(adapter, key)
    trust = trusting({"name": "ops", "key": new_key().public})
    assert refused(trust, adapter, raw).code == "untrusted"
    trusting({"name": "ops", "key": key.public})
    assert check(trust, adapter, raw) is not None
    trust.path.unlink()
    with pytest.raises(TrustUnreadable, match="No such file"):
        check(trust, adapter, raw)


def _changed(raw: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(raw)
    change(value)
    return json.dumps(value).encode()


def _resigned(raw: bytes, key: Key, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A bundle whose statement is another one, signed right."""
    from lora_fs.sidecar.trust.bundle import parse, pre_authenticated, write
    from lora_fs.sidecar.trust.signers import HASHES, hint_of

    payload = _changed(parse(raw).payload, change)
    signature = key.private.sign(pre_authenticated(payload), ec.ECDSA(HASHES[key.private.curve.name]))
    return write(payload, signature, {"publicKey": {"hint": hint_of(key.private.public_key())}})


BUNDLES: dict[str, Callable[[bytes, Key], bytes]] = {
    "nothing": lambda raw, key: b"",
    "a list": lambda raw, key: b"[]",
    "deep": lambda raw, key: b"[" * 100_000,
    "huge": lambda raw, key: b" " * (2 << 20),
    "no UTF-8": lambda raw, key: b"\xff" + raw,
    "cut off": lambda raw, key: raw[:-1],
    "a field twice": lambda raw, key: raw.replace(b'"keyid":""', b'"keyid":"","keyid":""'),
    "an unknown field": lambda raw, key: _changed(raw, lambda value: value.update(more=1)),
    "two signatures": lambda raw, key: _changed(
        raw,
        lambda value: value["dsseEnvelope"]["signatures"].append({"sig": "AA==", "keyid": ""}),
    ),
    "no hint": lambda raw, key: _changed(
        raw, lambda value: value["verificationMaterial"].update(publicKey={})
    ),
    "a certificate beside the key": lambda raw, key: _changed(
        raw, lambda value: value["verificationMaterial"].update(certificate={"rawBytes": "AA=="})
    ),
    "a log's entry": lambda raw, key: _changed(
        raw, lambda value: value["verificationMaterial"].update(tlogEntries=[{}])
    ),
    "two subjects": lambda raw, key: _resigned(raw, key, lambda one: one["subject"].append({})),
    "another statement": lambda raw, key: _resigned(raw, key, lambda one: one.update(predicateType="x")),
    "another type": lambda raw, key: _resigned(raw, key, lambda one: one.update(_type="x")),
    "shards": lambda raw, key: _resigned(
        raw,
        key,
        lambda one: one["predicate"]["serialization"].update(method="shards"),
    ),
    "another hash": lambda raw, key: _resigned(
        raw,
        key,
        lambda one: one["predicate"]["resources"][0].update(algorithm="blake2b"),
    ),
    "a file twice": lambda raw, key: _resigned(
        raw,
        key,
        lambda one: one["predicate"]["resources"].append(one["predicate"]["resources"][0]),
    ),
    "no statement": lambda raw, key: _resigned(raw, key, lambda one: one.clear()),
}


@pytest.mark.parametrize("what", BUNDLES)
def test_a_bundle_that_is_none(adapter: Path, trusting: Trusting, what: str) -> None:
    """A file that is no bundle of the one shape is untrusted, and never an exception of another kind."""
    key = new_key()
    trust = trusting({"name": "ops", "key": key.public})
    assert refused(trust, adapter, BUNDLES[what](signed(adapter, key), key)).code == "untrusted"


def test_a_payload_is_read_after_its_signature(adapter: Path, trusting: Trusting) -> None:
    """A statement that nobody trusted signed is not parsed."""
    key = new_key()
    value = json.loads(signed(adapter, key))
    value["dsseEnvelope"]["payload"] = base64.b64encode(b"{" * 1000).decode()
    trust = trusting({"name": "ops", "key": key.public})
    assert "is damaged" in str(refused(trust, adapter, json.dumps(value).encode()))


def test_what_cannot_be_signed(adapter: Path) -> None:
    """A key of another kind, a certificate of another key, a link and a pipe are refused, by their reason."""
    key, other = new_key(), new_authority().issue("build@acme")
    with pytest.raises(InputError, match="not an elliptic curve's"):
        sign(adapter, new_key(ec.SECP256K1()).pem)
    with pytest.raises(InputError, match="none in PEM"):
        sign(adapter, b"nothing")
    with pytest.raises(InputError, match="not the private key's"):
        sign(adapter, key.pem, certificates=other.certificates)
    (adapter / "link").symlink_to(adapter / "adapter_config.json")
    with pytest.raises(InputError, match="link is a symlink"):
        sign(adapter, key.pem)
    (adapter / "link").unlink()
    os.mkfifo(adapter / "pipe")  # nobody writes to it
    with pytest.raises(InputError, match="pipe is no regular file"):
        sign(adapter, key.pem)


def test_the_bundle_is_not_among_the_signed_files(adapter: Path) -> None:
    """A folder that is signed again gives the same statement."""
    key = new_key()
    payloads = []
    for _ in range(2):
        raw = signed(adapter, key)
        (adapter / BUNDLE).write_bytes(raw)
        payloads.append(json.loads(raw)["dsseEnvelope"]["payload"])
    assert payloads[0] == payloads[1]
