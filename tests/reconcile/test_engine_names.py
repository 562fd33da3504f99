"""A name in the engine tells the public name and the bytes, whatever both are."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from lora_fs.sidecar.model import engine_name, public_of, tells_bytes
from lora_fs.sidecar.reconcile.residents.foreign import copy_of

segments = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True) | st.just("0123456789ab")
digests = st.text("0123456789abcdef", min_size=64, max_size=64)


@st.composite
def publics(draw: st.DrawFn) -> str:
    """Every form that clients may write: with a namespace or not, plain or of a revision."""
    namespace, name, revision = draw(st.none() | segments), draw(segments), draw(st.none() | segments)
    plain = name if namespace is None else f"{namespace}/{name}"
    return plain if revision is None else f"{plain}@{revision}"


@given(publics(), publics(), digests, digests)
def test_one_name_for_one_public_name_and_its_bytes(one: str, other: str, digest: str, of: str) -> None:
    """The public name comes back whole, and two that differ in name or bytes differ in the engine."""
    assume(digest[:12] != of[:12])
    named = engine_name(one, f"sha256:{digest}")
    assert public_of(named) == one
    assert tells_bytes(named, digest)
    assert not tells_bytes(named, of)
    assert (engine_name(other, digest) == named) == (other == one)
    assert engine_name(one, of) != named


@given(publics(), digests, digests)
def test_a_path_says_whose_copy_it_is(public: str, digest: str, of: str) -> None:
    """Of the name's own bytes, in whatever stage folder; no client's name is taken for one."""
    assume(digest[:12] != of[:12])
    name = public.partition("@")[0].rpartition("/")[2]
    named = engine_name(public, digest)
    assert copy_of(named, f"/stage/{digest}/{name}") == f"sha256:{digest}"
    assert copy_of(named, f"/stage/{of}/{name}") is None
    assert copy_of(named, f"/stage/{digest}/{name}x") is None
    assert copy_of(named, f"/models/{name}") is None
