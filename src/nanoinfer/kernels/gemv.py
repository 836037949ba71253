"""Matrix-vector products for the smallest decode batches, with what surrounds them fused in: norm, SwiGLU, residual.

At batch 1 a token costs (number of kernels x launch gap) + (bytes of weights / bandwidth). So the RMSNorm before a
product runs inside it (each program norms the row again, which is cheaper than a kernel), the activation or the
residual add after it too, and the weights are requested before the wait for the predecessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import INTERPRETED, enter, pdl_options, prefetch_slice, wait_for_inputs

MAX_ROWS = 4  # beyond this many tokens the tensor-core form (skinny_matmul) is faster


class GemvShape(NamedTuple):
    rows: int  # output features per program
    num_warps: int


@triton.jit
def _gemv_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2N, K] with SWIGLU: N gate rows, then N up rows
    norm_weight_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    next_weight_ptr,
    next_bytes,
    eps,
    x_stride,
    N,
    K,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K: one program reads whole rows
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    enter(PDL)
    program = tl.program_id(0)
    row = program * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_K)
    row_valid = row < N
    column_valid = column < K
    valid = row_valid[:, None] & column_valid[None, :]
    tile = row.to(tl.int64)[:, None] * K + column[None, :]
    weight = tl.load(weight_ptr + tile, mask=valid, other=0.0)
    if SWIGLU:
        up_weight = tl.load(weight_ptr + N.to(tl.int64) * K + tile, mask=valid, other=0.0)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + column, mask=column_valid, other=0.0).to(tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=row_valid, other=0.0).to(tl.float32)
    if PREFETCH:
        prefetch_slice(next_weight_ptr, next_bytes, program, tl.num_programs(0), num_warps * 32)
    wait_for_inputs(PDL)

    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * x_stride + column, mask=column_valid, other=0.0).to(tl.float32)
        if NORM:
            x = x * tl.rsqrt(tl.sum(x * x, axis=0) / K + eps) * norm_weight
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        if SWIGLU:
            up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
            y = y * tl.sigmoid(y) * up
        if BIAS:
            y += bias
        if RESIDUAL:
            y += tl.load(residual_ptr + m * N + row, mask=row_valid, other=0.0).to(tl.float32)
        tl.store(out_ptr + m * N + row, y.to(out_ptr.dtype.element_ty), mask=row_valid)


def _default_shape(num_features: int, width: int) -> GemvShape:
    block = triton.next_power_of_2(width)
    rows = 2 if num_features >= 4096 else 1
    return GemvShape(rows, max(1, min(8, rows * block // 512)))


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    next_weight: Tensor | None = None,
    shape: GemvShape | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T for M <= MAX_ROWS -> [M, N] in x's dtype.

    With norm_weight [K], x is RMS-normed first. With swiglu, weight is [2N, K] (gate rows, then up rows) and the
    result is silu(gate) * up. bias [N] and residual [M, N] are added last. next_weight is the weight that the kernel
    after this one reads; it is brought into L2 meanwhile.
    """
    tokens, width = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    assert 1 <= tokens <= MAX_ROWS and weight.shape[1] == width, (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    assert not (swiglu and bias is not None)
    out = torch.empty(tokens, features, dtype=x.dtype, device=x.device)
    rows, num_warps = shape or _default_shape(features, width)
    _gemv_kernel[(triton.cdiv(features, rows),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        next_weight,
        0 if next_weight is None else next_weight.numel() * next_weight.element_size(),
        eps,
        x.stride(0),
        features,
        width,
        M=tokens,
        ROWS=rows,
        BLOCK_K=triton.next_power_of_2(width),
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PREFETCH=next_weight is not None and not INTERPRETED.value,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out
