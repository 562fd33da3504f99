"""The committed schemas are what the types say, and good JSON Schema."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from lora_fs import schemas

ROOT = Path(__file__).parents[2]
NAMES = schemas.names()


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_schemas", ROOT / ".ci" / "generate_schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shapes(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The object itself and each one it refers to."""
    yield "", schema
    yield from schema.get("$defs", {}).items()


def test_there_is_one_for_every_type(generator: ModuleType) -> None:
    """No file is left over and none is missing."""
    assert sorted({**generator.STORED, **generator.API, **generator.DOCUMENTS}) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_type_says(generator: ModuleType, name: str) -> None:
    """After a change of a type ``make schemas`` was run."""
    assert (ROOT / "schemas" / f"{name}.json").read_text() == generator.render(name)


def test_they_are_written_where_they_lie(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script writes the committed bytes, and removes the file of a type that is gone."""
    (tmp_path / "gone.json").write_text("{}")
    monkeypatch.setattr(generator, "FOLDER", tmp_path)
    generator.main()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in (ROOT / "schemas").glob("*.json")}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_schema_that_says_what_it_is(name: str) -> None:
    """Valid in its dialect, with its own address, sorted, and every object in it is described."""
    schema = schemas.load(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"https://lora-fs.dev/schemas/v1/{name}.json"
    text = (ROOT / "schemas" / f"{name}.json").read_text()
    assert text == json.dumps(schema, indent=2, sort_keys=True) + "\n"
    for where, shape in shapes(schema):
        assert shape["title"], where
        assert shape["description"], where
        assert "``" not in shape["description"], where
        assert "\n" not in shape["description"], where


def test_files_on_the_volume_may_have_more_fields(generator: ModuleType) -> None:
    """Every object in them takes the fields of a newer writer, and the seal is demanded."""
    for name in generator.STORED:
        schema = schemas.load(name)
        assert "sum" in schema["required"], name
        for where, shape in shapes(schema):
            if shape["type"] == "object":
                assert shape["additionalProperties"] is True, (name, where)


def test_every_field_on_the_volume_is_described(generator: ModuleType) -> None:
    """By a sentence of its own, or by the type that it refers to."""
    for name in generator.STORED:
        for where, shape in shapes(schemas.load(name)):
            for field, value in shape.get("properties", {}).items():
                assert "$ref" in value or value.get("description"), (name, where, field)


def test_no_description_is_left_of_a_field_that_is_gone(generator: ModuleType) -> None:
    """Every type that the script describes is in some schema."""
    titles = {shape["title"] for name in NAMES for _, shape in shapes(schemas.load(name))}
    assert generator.FIELDS.keys() <= titles
