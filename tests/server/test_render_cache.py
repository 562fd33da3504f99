"""What is made of each adapter follows the catalog, and is made again of nothing that stayed."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.reconcile.catalog import Catalog, Terms, build
from lora_fs.sidecar.server.ports import Served
from lora_fs.sidecar.server.routes.render_cache import RenderCache
from tests.reconcile.test_catalog import ONE, SEVERAL, Volume, pointer, record


@given(st.integers(0, 2**32), st.sampled_from([ONE, SEVERAL]))
def test_it_is_of_what_is_served(seed: int, namespaces: tuple[str, ...]) -> None:
    """After any changes: those names and no other, each of its record; another mapping if one is another."""
    chance, volume, catalog = random.Random(seed), Volume(namespaces), Catalog()
    made = RenderCache(lambda one: (one.name, one.record))
    last = made.of({})
    for number in range(20):
        before = dict(last)
        volume.walk(chance)
        catalog = build(volume.desired, Terms("tiny", namespaces), number, catalog)
        now = made.of(catalog.served)
        assert now == {name: (name, one.record) for name, one in catalog.served.items()}
        assert now is not last or now == before
        last = now


def test_what_stayed_is_not_made_again() -> None:
    """One adapter more is one thing made; the same list again is none, and one that went is none."""
    volume, made_of = Volume(SEVERAL), list[str]()

    def make(one: Served) -> str:
        made_of.append(one.name)
        return one.name

    made = RenderCache(make)
    volume.fill(3)
    catalog = build(volume.desired, Terms("tiny", SEVERAL), 1)
    made.of(catalog.served)
    assert len(made_of) == 9
    made_of.clear()
    for there in (True, False):
        volume.write(record("team-b", "new", "v1", "new", None, there), pointer("team-b", "new", "v1", None))
        catalog = build(volume.desired, Terms("tiny", SEVERAL), 2, catalog)
        assert made.of(catalog.served) is made.of(catalog.served)
        assert made_of == ["team-b/new"]
