"""RMSNorm: one program per token, one pass over the row. Few tokens have it fused with the product that follows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, wait_for_inputs


@triton.jit(do_not_specialize=["T"])
def _rms_norm_kernel(
    x_ptr,  # [T, H], or [PARTS, T, H] with a residual
    residual_ptr,  # [T, H]
    weight_ptr,  # [H]
    normed_ptr,  # [T, H]
    total_ptr,  # [T, H]
    eps,
    x_stride,
    T,
    H,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    column = tl.arange(0, BLOCK)
    valid = column < H
    weight = tl.load(weight_ptr + column, mask=valid, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + token * x_stride + column, mask=valid, other=0.0).to(tl.float32)
    row = token * H + column
    if RESIDUAL:
        for part in tl.static_range(1, PARTS):
            x += tl.load(x_ptr + (token + part * T) * x_stride + column, mask=valid, other=0.0).to(tl.float32)
        x += tl.load(residual_ptr + row, mask=valid, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row, rounded, mask=valid)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / H + eps) * weight
    tl.store(normed_ptr + row, normed.to(normed_ptr.dtype.element_ty), mask=valid)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, normed: Tensor, total: Tensor) -> None:
    width = x.shape[-1]
    rows = x.view(-1, width)
    tokens = normed.numel() // width
    assert x.stride(-1) == 1, x.stride()
    assert residual is None or residual.is_contiguous()
    if tokens == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(tokens,)](
        rows,
        residual,
        weight,
        normed,
        total,
        eps,
        rows.stride(0),
        tokens,
        width,
        BLOCK=block,
        PARTS=len(rows) // tokens,
        RESIDUAL=residual is not None,
        num_warps=max(1, min(16, block // 256)),
        **pdl_options(x),
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467). x [..., H], weight [H] -> [..., H]."""
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, normed, normed)
    return normed


def sum_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """parts [P, T, H] and residual [T, H] summed, and the RMS norm of that: (normed, sum), both like the residual."""
    assert parts.is_contiguous()
    assert parts.shape[1:] == residual.shape, (parts.shape, residual.shape)
    normed, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(parts, residual, weight, eps, normed, total)
    return normed, total
