"""Kernels in Gluon have no interpreter; what they compute is tested on a GPU, and here that they compile for one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from nanoinfer.kernels.common import HOPPER_SHARED_MEMORY
from nanoinfer.kernels.layer_cuts import MAX_TILES
from nanoinfer.kernels.persistent_layer import SLOTS


def test_they_compile_for_a_hopper_gpu_and_fit_into_its_shared_memory():
    """With whichever Triton is installed: its names change from version to version."""
    source = Path(__file__).parent / "gluon_assembly.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, source], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels = {record.pop("kernel"): record for record in json.loads(result.stdout)}
    assert len(kernels) == 4
    for name, record in kernels.items():
        assert record["shared"] <= HOPPER_SHARED_MEMORY, (name, record)
        assert record["instructions"]["wgmma.mma_async"] > 0, (name, record)
        assert record["instructions"]["griddepcontrol.wait"] == 1, (name, record)
    for block in (16, 32, 64):  # gate and up rows come interleaved, by one request with four dimensions
        assert kernels[f"persistent {block}"]["instructions"]["cp.async.bulk.tensor.4d"] > 0


def test_all_tiles_of_a_step_fit_into_the_ring():
    """They are given back together, so a step with more of them would wait for itself."""
    assert min(SLOTS.values()) >= MAX_TILES
