"""What the Triton kernels share: programmatic dependent launch, L2 prefetch, and a dot that the interpreter gets right.

Programmatic dependent launch (PDL, CUDA programming guide, sm_90 and later) starts a kernel while its predecessor still
runs. Every kernel here follows one rule, and the whole chain is right only if all do: call `gdc_launch_dependents` first,
read nothing but constants (weights) before `gdc_wait`, and call `gdc_wait` in every program. Since a kernel ends after
its own wait, waiting for the predecessor is then waiting for everything before it.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def pdl_options(x: Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel with a PDL constexpr, for the device of x."""
    pdl = supports_pdl(x.device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32."""
    if INTERPRETED:  # the interpreter multiplies bfloat16 operands as if they were integers
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def enter(PDL: tl.constexpr):
    """First statement of a kernel: let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before the first read of anything that an earlier kernel wrote, and before the first write."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_slice(weight_ptr, num_bytes, program, num_programs, THREADS: tl.constexpr):
    """Ask for this program's share of num_bytes at weight_ptr to be brought into L2; THREADS = 32 * num_warps.

    Used on the weights of the kernel after this one, so that the memory is never idle between two kernels.
    """
    share = tl.cdiv(tl.cdiv(num_bytes, num_programs), 16) * 16
    # The instruction is issued lane by lane, so few lanes ask for pieces of at least 2 KiB.
    piece = tl.maximum(tl.cdiv(tl.cdiv(share, THREADS), 16) * 16, 2048)
    inside = tl.arange(0, THREADS) * piece
    begin = program.to(tl.int64) * share + inside
    size = tl.minimum(tl.minimum(share - inside, piece).to(tl.int64), num_bytes - begin).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
        .reg .pred unwanted;
        setp.le.s32 unwanted, $2, 0;
        @unwanted bra skip;
        cp.async.bulk.prefetch.L2.global [$1], $2;
        skip:
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [weight_ptr.to(tl.int64) + begin, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
