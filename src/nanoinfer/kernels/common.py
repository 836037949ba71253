"""What the Triton kernels share: programmatic dependent launch, and a dot that the interpreter gets right.

Programmatic dependent launch (PDL, CUDA programming guide, sm_90 and later) starts a kernel while its predecessor still
runs. The chain is right only if every kernel follows these rules: it calls `gdc_launch_dependents` first; before
`gdc_wait` it writes nothing, and reads only what was complete before the step's embedding started (weights, the step's
inputs, keys and values of earlier steps); and it does not end without `gdc_wait` having been called in one of its
programs, which thus ends after its predecessor. So waiting for the predecessor is waiting for everything before it.

The embedding is the barrier: it is no dependent launch, so it starts when all before it is complete, and since it never
calls `gdc_launch_dependents`, nothing behind it starts before it ends.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER_SHARED_MEMORY = 227 * 1024
LOG2_E = 1.4426950408889634  # kernels exponentiate to base 2
INTERPRETED: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@cache
def supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@cache
def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


def pdl_options(x: Tensor) -> dict[str, Any]:
    """Launch arguments of a kernel with a PDL constexpr, for the device of x."""
    pdl = supports_pdl(x.device)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


def product_sizes(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *, swiglu: bool
) -> tuple[int, int, int]:
    """(tokens, width, output features) of x [M, K] @ weight.T, once it is known that our kernels can read all of it."""
    tokens, width = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    assert weight.shape[1] == width, (x.shape, weight.shape)
    assert x.stride(1) == 1, x.stride()
    assert weight.is_contiguous()
    assert residual is None or residual.is_contiguous()
    assert not swiglu or bias is None
    return tokens, width, features


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in float32; operands of three dimensions are multiplied part by part of the first."""
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
