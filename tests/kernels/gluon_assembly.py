"""Compiles the kernels that have no interpreter for an sm_90 GPU, which need not be there.

Prints a JSON list of {"kernel", "shared" (bytes of shared memory), "instructions"}.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from nanoinfer.kernels.layer_cuts import TILE_ROWS, TILE_WIDTH, layer_cuts
from nanoinfer.kernels.persistent_layer import SLOTS, STAGES, _persistent_kernel
from nanoinfer.kernels.streamed_matmul import _stream_kernel
from nanoinfer.kernels.weight_ring import PAIRS, TILE

TYPES = {"squares_ptr": "*fp32", "partial_ptr": "*fp32", "meetings_ptr": "*i64", "counters_ptr": "*i32", "eps": "fp32"}
INSTRUCTIONS = ("wgmma.mma_async", "cp.async.bulk.tensor.2d", "cp.async.bulk.tensor.4d", "griddepcontrol.wait")


def compiled(name: str, kernel: Any, constants: dict[str, Any], types: dict[str, str], num_warps: int) -> dict:
    names = kernel.arg_names
    default = {n: "*bf16" if n.endswith("_ptr") else "i32" for n in names} | types
    signature = {n: "constexpr" if n in constants else default[n] for n in names}
    values = {(names.index(n),): value for n, value in constants.items()}
    multiples = [n for n in names if signature[n].startswith("*") or n in ("x_stride", "N", "K")]
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n in multiples}
    source = GluonASTSource(kernel, signature, values, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
    found = {text: result.asm["ptx"].count(text) for text in INSTRUCTIONS}
    return {"kernel": name, "shared": result.metadata.shared, "instructions": found}


def persistent(block: int) -> dict:
    cuts = layer_cuts(4096, 4096, 12288, 6144, 132)
    constants = {
        "CUTS": cuts, "ALL_TILES": 64, "BLOCK_M": block, "SLOTS": SLOTS[block], "STAGES": STAGES[block], "BIAS": True,
        "PDL": True,
    }  # fmt: skip
    types = dict(TYPES)
    for n in _persistent_kernel.arg_names:
        if n == "gate_up_desc":
            types[n] = f"tensordesc<bf16[{TILE_ROWS // 16}, 2, 8, {TILE_WIDTH}],{PAIRS.value!r}>"
        elif n.endswith("_desc"):
            rows = block if n in ("attended_desc", "weighted_desc", "inner_desc") else TILE_ROWS
            types[n] = f"tensordesc<bf16[{rows}, {TILE_WIDTH}],{TILE.value!r}>"
    return compiled(f"persistent {block}", _persistent_kernel, constants, types, 4)


def streamed() -> dict:
    constants = {
        "BLOCK_N": 64, "BLOCK_M": 32, "BLOCK_K": 128, "STEPS": 4, "SPLITS": 2, "STAGES": 4, "SWIGLU": True,
        "BIAS": False, "RESIDUAL": False, "PDL": True,
    }  # fmt: skip
    return compiled("streamed", _stream_kernel, constants, dict(TYPES), 4)


if __name__ == "__main__":
    print(json.dumps([persistent(16), persistent(32), persistent(64), streamed()]))
