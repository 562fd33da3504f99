"""The ConfigMap of the removed sidecar: what it says, and what cannot be read is no empty list."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lora_fs.sidecar.errors import InputError
from lora_fs.sidecar.sources.migration.gie import Listed, parse

BARE = """
vLLMLoRAConfig:
  host: localhost
  port: 8000
  defaultBaseModel: base
  ensureExist:
    models:
    - {id: a, source: org/a}
    - {id: b, source: /b, base-model: other}
  ensureNotExist:
    models:
    - {id: c}
"""


def test_a_bare_configuration_and_a_manifest_say_the_same() -> None:
    """With base models taken over from the default where a model has none."""
    config = parse(BARE)
    manifest = yaml.safe_dump({"kind": "ConfigMap", "data": {"configmap.yaml": BARE, "other": "text"}})
    assert parse(manifest) == config
    assert parse(f"kind: Service\n---\n{manifest}---\n") == config
    assert config.exist == (Listed("a", "org/a", "base"), Listed("b", "/b", "other"))
    assert config.not_exist == (Listed("c", None, "base"),)


def test_what_is_in_both_lists_is_passed_over() -> None:
    """As that sidecar did."""
    text = (
        "vLLMLoRAConfig: {ensureExist: {models: [{id: a, source: x}]}, ensureNotExist: {models: [{id: a}]}}"
    )
    config = parse(text)
    assert (config.exist, config.not_exist, config.both) == ((), (), ("a",))


@pytest.mark.parametrize("text", ["vLLMLoRAConfig:", "vLLMLoRAConfig: {ensureExist: {models: }}"])
def test_empty_lists_are_empty(text: str) -> None:
    """A configuration without models is read as one."""
    assert parse(text).exist == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "0 of its documents"),
        ("- a", "0 of its documents"),
        ("a: [", "not YAML"),
        ("kind: ConfigMap\ndata: {a: b}", "0 of the ConfigMap's data"),
        ("kind: ConfigMap", "0 of the ConfigMap's data"),
        (f"{BARE}---{BARE}", "2 of its documents"),
        ("vLLMLoRAConfig: [1]", "not a mapping"),
        ("vLLMLoRAConfig: {ensureExist: {models: {a: b}}}", "ensureExist.models: not a list"),
        ("vLLMLoRAConfig: {ensureExist: {models: [a]}}", r"models\[0\]"),
        ("vLLMLoRAConfig: {ensureExist: {models: [{id: 1, source: a}]}}", r"models\[0\]"),
        ("vLLMLoRAConfig: {ensureExist: {models: [{id: a}]}}", "source: is missing"),
        ("vLLMLoRAConfig: {ensureExist: {models: [{id: a, source: [b]}]}}", "source: not text"),
        ("vLLMLoRAConfig: {ensureExist: {models: [{id: a, source: b}, {id: a, source: c}]}}", "listed twice"),
        ("!!python/object/apply:os.system [true]", "not YAML"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, says: str) -> None:
    """Where it is wrong; nothing is taken for an empty list, and no object is made."""
    with pytest.raises(InputError, match=says):
        parse(text)


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No text ends in another error."""
    for given_text in (text, "vLLMLoRAConfig:\n  " + text):
        try:
            parse(given_text)
        except InputError:
            continue
