"""Matrix-vector product for a single token, with what surrounds it fused in: norm, SwiGLU, residual.

At batch 1 a token costs (number of kernels x the gap between two) + (bytes of weights / bandwidth). So the RMSNorm
before a product runs inside it (every program sums the row's squares again, which is cheaper than a kernel), the
activation or the residual add after it too, and the weights are requested before the wait for the predecessor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, product_sizes, wait_for_inputs

MAX_WIDTH = 2**14  # elements of a row, which a program has in its registers


class GemvConfig(NamedTuple):
    rows: int  # output features per program
    num_warps: int


@triton.jit
def _gemv_kernel(
    x_ptr,  # [K]
    weight_ptr,  # [N, K], or [2N, K] with SWIGLU: N gate rows, then N up rows
    norm_weight_ptr,  # [K]
    bias_ptr,  # [N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N,
    K,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # power of two >= K: one program reads whole rows
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
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
    wait_for_inputs(PDL)

    x = tl.load(x_ptr + column, mask=column_valid, other=0.0).to(tl.float32)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row, mask=row_valid, other=0.0).to(tl.float32)
    if NORM:  # the norm's factor is one number: applied to the sums, it does not delay them
        factor = tl.rsqrt(tl.sum(x * x, axis=0) / K + eps)
        x = x * norm_weight
    y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
    if SWIGLU:
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], axis=1)
        if NORM:
            up *= factor
    if NORM:
        y *= factor
    if SWIGLU:
        y = y * tl.sigmoid(y) * up
    if BIAS:
        y += bias
    if RESIDUAL:
        y += residual
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=row_valid)


def _default_config(width: int, swiglu: bool) -> GemvConfig:
    """Measured on an H200: a few kilobytes of weights per program, one to eight warps."""
    if width <= 1024:
        return GemvConfig(2, 1) if swiglu else GemvConfig(4, 2)
    return GemvConfig(2, 4) if width <= 2048 or swiglu else GemvConfig(2, 8)


def gemv(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    config: GemvConfig | None = None,
) -> Tensor:
    """x [1, K] @ weight [N, K].T -> [1, N] in out_dtype (x's if None).

    With norm_weight [K], x is RMS-normed first. With swiglu, weight is [2N, K] (gate rows, then up rows) and the
    result is silu(gate) * up. bias [N] and residual [1, N] are added last.
    """
    tokens, width, features = product_sizes(x, weight, bias, residual, swiglu=swiglu)
    assert tokens == 1, x.shape
    out = torch.empty(1, features, dtype=out_dtype or x.dtype, device=x.device)
    rows, num_warps = config or _default_config(width, swiglu)
    _gemv_kernel[(triton.cdiv(features, rows),)](
        x,
        weight,
        norm_weight,
        bias,
        residual,
        out,
        eps,
        features,
        width,
        ROWS=rows,
        BLOCK_K=triton.next_power_of_2(width),
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out
