"""The engines and adapters of the end-to-end tests, here of another process."""

from __future__ import annotations

from tests.e2e.conftest import adapters, farm, forked, model_dir, work_dir

__all__ = ["adapters", "farm", "forked", "model_dir", "work_dir"]
