"""What the plugin relies on in this vLLM is looked at and tried before anything is hooked."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.lora import lora_model
from vllm.lora.layers import BaseLayerWithLoRA, ReplicatedLinearWithLoRA
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
from vllm.v1.core import kv_cache_utils

from lora_fs.worker_patch.compat import TESTED
from lora_fs.worker_patch.versions import differences, layers, probes
from lora_fs.worker_patch.versions.differences import DIFFERENCES, reads_patterns
from lora_fs.worker_patch.versions.surface import ATTRIBUTES, SIGNATURES, missing
from lora_fs.worker_patch.worker import hooks, ids, put
from lora_fs.worker_patch.worker.load import fits
from lora_fs.worker_patch.worker.load.fits import DoesNotFit, check_patterns
from lora_fs.worker_patch.worker.slots.layers import shape_of
from tests.conftest import engine_minor
from tests.plugin.block import Make

TESTS = Path(__file__).parents[1]
NAMED = [(where, name) for where, names in ATTRIBUTES.items() for name in names]


def minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_this_vllm_has_all_of_it() -> None:
    assert [*missing(), *probes.failing()] == []


@pytest.mark.parametrize("where", SIGNATURES)
def test_a_function_with_other_parameters_is_told(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its name, and what it takes now."""
    module, _, path = where.partition(":")
    *above, name = path.split(".")
    owner = pkgutil.resolve_name(f"{module}:{'.'.join(above)}") if above else pkgutil.resolve_name(module)

    def changed(self: object, *, more: int) -> None: ...

    monkeypatch.setattr(owner, name, changed)
    assert any(f"{path} takes ('self', 'more'), and" in told for told in missing())


@pytest.mark.parametrize("what", [7, dict.update, property(lambda self: None)], ids=type)
def test_a_hooked_name_that_is_no_function_is_reported(what: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error there would be a traceback, whatever LORA_FS_UNFIT is."""
    monkeypatch.setattr(LRUCacheWorkerLoRAManager, "add_adapter", what)
    (told,) = missing()
    assert told.startswith("LRUCacheWorkerLoRAManager.add_adapter ")


@pytest.mark.parametrize(("where", "name"), NAMED, ids=lambda value: value.rpartition(".")[2])
def test_an_attribute_that_is_gone_is_told(where: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Be it of a module, of a class, or set by a method."""
    bare = SimpleNamespace() if ":" not in where else type("Bare", (), {})
    resolve = pkgutil.resolve_name
    monkeypatch.setattr(pkgutil, "resolve_name", lambda one: bare if one == where else resolve(one))
    assert f"{where.partition(':')[2] or where} has no {name}" in list(missing())


def test_a_module_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not raised: the sentence says which name was looked for."""
    monkeypatch.delattr(kv_cache_utils, "generate_block_hash_extra_keys")
    assert any(told.startswith("generate_block_hash_extra_keys is not there") for told in missing())


def test_a_new_kind_of_layer_is_told() -> None:
    """One of vLLM's own; another package's are left to vLLM, and are no reason not to start."""
    assert probes.layer_kinds() is None

    class Other(BaseLayerWithLoRA): ...  # type: ignore[misc]

    assert probes.layer_kinds() is None
    Other.__module__ = "vllm.lora.layers.new"
    try:
        assert "Other" in str(probes.layer_kinds())
    finally:
        Other.__module__ = __name__


def test_adapters_that_share_prefix_blocks_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One would be answered from what the other computed."""
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", lambda *_: ((), 0))
    assert "share prefix blocks" in str(probes.prefix_blocks())


def test_a_probe_that_fails_is_no_probe_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be tried is told."""
    monkeypatch.delattr(kv_cache_utils, "generate_block_hash_extra_keys")
    (told,) = probes.failing()
    assert told.startswith("prefix_blocks cannot be tried: ImportError")


@pytest.mark.parametrize("kind", sorted(layers.COMPARED - layers.TAKEN_OVER, key=str))
def test_a_kind_that_is_vllms_is_not_taken_over(make: Make, kind: type) -> None:
    """Whatever it derives from."""
    module = make("torch").modules["o_proj"]
    assert shape_of(module) is not None
    module.__class__ = kind
    assert shape_of(module) is None


def test_a_kind_that_nobody_knows_is_vllms(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """It is not taken over for its base, no adapter is held against it, and it is told once."""

    class OfAnotherPackage(ReplicatedLinearWithLoRA): ...  # type: ignore[misc]

    manager = make("torch")
    module = manager.modules["o_proj"]
    module.__class__ = OfAnotherPackage
    del manager.layers.targets["o_proj"]
    with caplog.at_level(logging.WARNING, "lora_fs"):
        for name in ("o_proj", "layers.1.o_proj"):
            manager.register_module(name, module)
    assert not manager.layers.targets.keys() & {"o_proj", "layers.1.o_proj"}
    (told,) = [record.getMessage() for record in caplog.records if "OfAnotherPackage" in record.getMessage()]
    assert "vLLM computes o_proj" in told


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_one_of_the_tested(what: str) -> None:
    """It is found the new way from the minor after its last one on, and that one is still served."""
    last, new = DIFFERENCES[what]
    assert new() == (engine_minor() > minor(last))  # type: ignore[operator]
    assert minor(last) >= minor(TESTED[0]), f"no vLLM that is served needs the branch for {what}: delete it"


def test_every_difference_is_in_the_table() -> None:
    """A branch that is in no row of it would outlive the last vLLM that needs it."""
    rows = {probe.__name__ for _, probe in DIFFERENCES.values()} | set(
        " and ".join(DIFFERENCES).split(" and ")
    )
    own = inspect.getmembers(differences, inspect.isfunction)
    assert {name for name, one in own if one.__module__ == differences.__name__} <= rows


def marked(name: str) -> set[str]:
    """The minors that the tests' marks of a name give."""
    given: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"pytest.mark.{name}":
                given.add(ast.literal_eval(node.args[0]))
    return given


def test_what_an_old_one_cannot_is_left_out_while_that_one_is_served() -> None:
    """A mark ``since`` names a minor from which on a difference is gone: it goes with the difference."""
    lasts = [minor(last) for last, _ in DIFFERENCES.values()]
    assert marked("since") == {f"{major}.{number + 1}" for major, number in lasts}


def test_a_mended_defect_is_looked_for_while_one_that_has_it_is_served() -> None:
    """A mark ``until`` names the minor that mended it: its test goes with the last vLLM before that."""
    assert all(minor(TESTED[0]) < minor(mended) <= minor(TESTED[-1]) for mended in marked("until"))


def test_a_kind_that_the_newest_lacks_is_of_no_other() -> None:
    """So far names of layers were added alone: one that is gone needs a row among the differences."""
    gone = [name for name in layers.NAMES if not hasattr(vllm.lora.layers, name)]
    assert gone == [] or engine_minor() != minor(TESTED[-1])


@pytest.mark.parametrize("pattern", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_would_be_ignored_are_refused(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM that does not read them would answer with another rank or scale, without a word."""
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps({"r": 4, pattern: {"q_proj": 8}}))
    if reads_patterns():
        check_patterns(str(tmp_path))
    monkeypatch.setattr(fits, "reads_patterns", lambda: False)
    with pytest.raises(DoesNotFit, match=f"vLLM {vllm.__version__} ignores {pattern}.*needs vLLM 0.32"):
        check_patterns(str(tmp_path))
    config.write_text(json.dumps({"r": 4, pattern: {}}))
    check_patterns(str(tmp_path))


def test_a_hook_that_finds_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody looks, what is put changes nothing."""
    monkeypatch.delattr(lora_model, "PIN_MEMORY")
    with pytest.raises(AttributeError, match=r"vllm\.lora\.lora_model has no PIN_MEMORY"):
        put.put(lora_model, "PIN_MEMORY", False)


def test_every_hook_is_in_the_table() -> None:
    """What ``put`` replaces was looked for before the first of them is put."""
    wanted = {name for _, name in NAMED} | {where.rpartition(".")[2] for where in SIGNATURES}
    put: set[Any] = set()
    for source in (hooks, ids):
        text = inspect.getsource(source)
        put |= {line.split('"')[1] for line in text.splitlines() if line.strip().startswith("put(")}
    assert put
    assert put <= wanted
