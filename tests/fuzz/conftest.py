"""A good adapter to spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.validate.conftest import Draft


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """A good adapter, not written yet."""
    return Draft(tmp_path / "adapter")
