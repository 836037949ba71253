"""Kernel tests run on the GPU where there is one, else in Triton's interpreter; without triton they are skipped."""

from __future__ import annotations

import pytest
import torch
from triton_interpreter import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
