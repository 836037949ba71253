"""Prints the PTX of peer_exchange's kernel for an sm_90 GPU, which need not be there.

python exchange_assembly.py RANKS
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nanoinfer.kernels.peer_exchange import LINES, _exchange_kernel


def main(size: int) -> None:
    names = _exchange_kernel.arg_names
    constants = {"RANK": size - 1, "SIZE": size, "LINES": LINES, "DTYPE": tl.bfloat16, "GATHER": False, "PDL": True}
    pointers = {"addresses_ptr": "*i64"} | {name: "*i32" for name in names if name.endswith("_ptr")}
    pointers["addresses_ptr"] = "*i64"
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(_exchange_kernel, signature, values)
    print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["ptx"])


if __name__ == "__main__":
    main(int(sys.argv[1]))
