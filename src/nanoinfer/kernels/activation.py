"""SwiGLU's elementwise part: silu(gate) * up over the fused gate/up projection's output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, wait_for_inputs

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(gate_up_ptr, out_ptr, I, BLOCK: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < I
    row = gate_up_ptr + token * 2 * I
    gate = tl.load(row + column, mask=valid, other=0.0).to(tl.float32)
    up = tl.load(row + I + column, mask=valid, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + token * I + column, out.to(out_ptr.dtype.element_ty), mask=valid)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's elementwise part (arXiv:2002.05202): [T, 2I], gate first, -> silu(gate) * up, [T, I]."""
    assert gate_up.is_contiguous()
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
    if tokens > 0:
        _silu_mul_kernel[(tokens, triton.cdiv(width, BLOCK))](
            gate_up, out, width, BLOCK=BLOCK, num_warps=4, **pdl_options(gate_up)
        )
    return out
