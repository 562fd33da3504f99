"""The examples of ``docs/format.md`` are files lora-fs would read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas
from lora_fs.sidecar.registry.codec import unseal

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
EXAMPLES = re.findall(r"<!-- schema: ([a-z-]+) -->\n```json\n(.*?)\n```", TEXT, re.DOTALL)


def test_every_json_block_names_its_schema() -> None:
    """None is left unchecked, and each file of the tree has one."""
    assert len(EXAMPLES) == TEXT.count("```json")
    assert {name for name, _ in EXAMPLES} == {"record", "pointer", "marker", "head", "replica-status"}


@pytest.mark.parametrize(("name", "example"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_is_valid(name: str, example: str) -> None:
    """Its seal holds and so does its schema."""
    Draft202012Validator(schemas.load(name)).validate(unseal(example.encode()))
