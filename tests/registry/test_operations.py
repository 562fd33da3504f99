"""Register, unregister, promote and roll back, on a real filesystem."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_fs.sidecar.errors import Conflict, InputError, InvalidAdapter, InvalidName, NotFound
from lora_fs.sidecar.model import Scope
from lora_fs.sidecar.registry import operations
from lora_fs.sidecar.registry.operations import Registered, Registration
from lora_fs.sidecar.registry.store import Registry
from lora_fs.sidecar.registry.view import RegistryView
from lora_fs.sidecar.validate import Expectation
from tests.registry.conftest import MakeAdapter


def put(registry: Registry, scope: Scope, source: Path, name: str = "a1", **more: object) -> Registered:
    wanted = Registration(name, source, source.as_uri(), **more)  # type: ignore[arg-type]
    return operations.register(registry, scope, wanted, Expectation(), writer="test")


def served(registry: Registry, scope: Scope) -> dict[str, str]:
    """What a fresh reader finds: name → active revision."""
    view = RegistryView(registry, (scope,))
    view.refresh()
    return {name: record.revision for _, name, record in view.desired.active()}


def test_registered_is_served_to_a_fresh_reader(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """A reader that starts after register finds the name and its first revision, v1."""
    put(registry, scope, make_adapter())
    assert served(registry, scope) == {"a1": "v1"}


def test_same_bytes_change_nothing(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Registering the same bytes again writes no generation."""
    put(registry, scope, make_adapter())
    assert not put(registry, scope, make_adapter()).changed


def test_a_revision_never_changes(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """The same revision with other bytes is refused and the first bytes stay."""
    put(registry, scope, make_adapter(), revision="r1")
    with pytest.raises(Conflict, match="other bytes"):
        put(registry, scope, make_adapter(seed=1), revision="r1")
    assert served(registry, scope) == {"a1": "r1"}


def test_next_revision_promote_and_rollback(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """New bytes are v2 and active; rollback serves v1 again; promote serves v2 again."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    assert served(registry, scope) == {"a1": "v2"}
    operations.rollback(registry, scope, "a1", writer="test")
    assert served(registry, scope) == {"a1": "v1"}
    operations.promote(registry, scope, "a1", "v2", writer="test")
    assert served(registry, scope) == {"a1": "v2"}


def test_unregister_asks_which_of_several(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter
) -> None:
    """With two revisions nothing is removed until one, or all, are named."""
    put(registry, scope, make_adapter())
    put(registry, scope, make_adapter(seed=1))
    with pytest.raises(InputError, match="2 revisions"):
        operations.unregister(registry, scope, "a1", writer="test")
    operations.unregister(registry, scope, "a1", writer="test", all_revisions=True)
    assert served(registry, scope) == {}
    with pytest.raises(NotFound):
        operations.unregister(registry, scope, "a1", writer="test")


@pytest.mark.parametrize("name", ["..", "a/b", "%2e", "a\0b", "x" * 5000, "é", "", ".hidden"])
def test_bad_names_are_refused(
    registry: Registry, scope: Scope, make_adapter: MakeAdapter, name: str
) -> None:
    """No name outside the grammar reaches a path."""
    with pytest.raises(InvalidName):
        put(registry, scope, make_adapter(), name=name)
    assert served(registry, scope) == {}


def test_a_truncated_adapter_is_refused(registry: Registry, scope: Scope, make_adapter: MakeAdapter) -> None:
    """Truncated weights are refused with the file's name and nothing is written."""
    source = make_adapter()
    weights = source / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.safetensors"):
        put(registry, scope, source)
    assert not registry.layout.scope(scope).exists()
