"""Fixtures for tests that need real data: each skips its test where the data is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of shared test data: $NANOINFER_SHARED, or `shared` beside the checkout."""
    folder = Path(os.environ.get("NANOINFER_SHARED", Path(__file__).parents[2] / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared test data at {folder}; set NANOINFER_SHARED")
    return folder
