"""The schemas travel with the package and load by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_fs import schemas

FOLDER = Path(__file__).parents[2] / "schemas"


def test_names_equal_the_files() -> None:
    """Every JSON file of the folder has a name, and no name lacks its file."""
    assert schemas.names() == sorted(path.stem for path in FOLDER.glob("*.json"))


def test_loaded_schemas_are_objects_with_an_id() -> None:
    """Each one is a JSON Schema that says which dialect it is written in."""
    for name in schemas.names():
        assert "$schema" in schemas.load(name), name


def test_a_caller_may_change_what_it_loaded() -> None:
    """Two loads share nothing."""
    for name in schemas.names():
        schemas.load(name)["changed"] = True
        assert "changed" not in schemas.load(name)


def test_unknown_name_is_an_error() -> None:
    """A schema that does not exist never reads as an empty one, which would accept everything."""
    with pytest.raises(FileNotFoundError):
        schemas.load("no-such-schema")
