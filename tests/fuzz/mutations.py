"""Edits of a good input, as data: bytes cut, put in or turned, and values of its JSON replaced."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

Edit = tuple[str, int, Any]

_TEXT = st.text(max_size=8) | st.sampled_from(["../x", "\ud800", "a" * 300, "é", "e\u0301", "\x1b[2J", "\0"])
_NUMBERS = st.integers() | st.floats() | st.sampled_from([2**63, -(2**63) - 1, 10**400, 1e308])
VALUES = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=6,
)


def edits(words: tuple[str, ...]) -> st.SearchStrategy[list[Edit]]:
    """Up to four edits, each at a place that is taken modulo what there is."""
    place = st.integers(0, 1 << 20)
    put = st.binary(max_size=12)
    if words:
        put |= st.sampled_from([word.encode(errors="surrogatepass") for word in words])
    one = (
        st.tuples(st.just("value"), place, VALUES)
        | st.tuples(st.just("drop"), place, st.none())
        | st.tuples(st.just("insert"), place, put)
        | st.tuples(st.just("replace"), place, put)
        | st.tuples(st.just("cut"), place, st.none())
        | st.tuples(st.just("repeat"), place, st.integers(1, 64))
    )
    return st.lists(one, min_size=1, max_size=4)


def mutate(data: bytes, changes: list[Edit]) -> bytes:
    """Apply the edits in their order."""
    for kind, place, what in changes:
        at = place % (len(data) + 1)
        if kind in ("value", "drop"):
            data = _in_json(data, place, what, drop=kind == "drop")
        elif kind == "insert":
            data = data[:at] + what + data[at:]
        elif kind == "replace":
            data = data[:at] + what + data[at + len(what) :]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + data[at : at + what] * 8 + data[at:]
    return data


def _in_json(data: bytes, place: int, what: object, *, drop: bool) -> bytes:
    """Replace or remove one value of the JSON that begins at the first brace; the rest stays."""
    begin = max(data.find(b"{"), 0)
    try:
        body, end = json.JSONDecoder().raw_decode(data[begin:].decode("latin-1"))
    except (ValueError, RecursionError):
        return data
    slots: list[tuple[Any, Any]] = []
    waiting: list[Any] = [body]
    while waiting:
        inner = waiting.pop()
        keys: list[Any] = list(inner) if isinstance(inner, dict) else []
        if isinstance(inner, list):
            keys = list(range(len(inner)))
        slots += [(inner, key) for key in keys]
        waiting += [inner[key] for key in keys]
    if not slots:
        return data
    holder, key = slots[place % len(slots)]
    if drop:
        del holder[key]
    else:
        holder[key] = what
    return data[:begin] + json.dumps(body).encode() + data[begin + end :]
