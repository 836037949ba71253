"""These tests are collected before the kernels' own and import triton, too: it must know by then how it is to run."""

from __future__ import annotations

import triton_interpreter  # noqa: F401
