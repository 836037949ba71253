"""Matrix products of a few tokens with a large weight, on the tensor cores, with norm, SwiGLU and residual fused in.

Bandwidth decides here: every weight is read once, by one program that streams whole rows. The weight tile is the left
operand (the many rows), the tokens are the narrow right one, so a batch of 16 wastes nothing of the matrix unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import INTERPRETED, dot, enter, pdl_options, prefetch_slice, wait_for_inputs

MAX_ROWS = 64


class SkinnyShape(NamedTuple):
    block_features: int
    block_width: int
    num_warps: int
    num_stages: int


@triton.jit
def _skinny_matmul_kernel(
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
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PREFETCH: tl.constexpr,
    PREFETCH_OWN: tl.constexpr,
    PDL: tl.constexpr,
    num_warps: tl.constexpr,
):
    enter(PDL)
    program = tl.program_id(0)
    row = program * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    row_valid = row < N
    token_valid = token < M
    if PREFETCH_OWN:  # constants may be requested before the wait, and this program's rows are contiguous
        rows = tl.minimum(N - program * BLOCK_N, BLOCK_N)
        own_ptr = weight_ptr + (program * BLOCK_N).to(tl.int64) * K
        prefetch_slice(own_ptr, rows * K * 2, program * 0, 1, num_warps * 32)
        if SWIGLU:
            prefetch_slice(own_ptr + N.to(tl.int64) * K, rows * K * 2, program * 0, 1, num_warps * 32)
    if PREFETCH:
        prefetch_slice(next_weight_ptr, next_bytes, program, tl.num_programs(0), num_warps * 32)
    wait_for_inputs(PDL)

    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * K
    for start in range(0, K, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            weight = tl.load(weight_row + column[None, :], mask=row_valid[:, None], other=0.0)
            x = tl.load(x_ptr + token[None, :] * x_stride + column[:, None], mask=token_valid[None, :], other=0.0)
        else:
            inside = column < K
            weight = tl.load(weight_row + column[None, :], mask=row_valid[:, None] & inside[None, :], other=0.0)
            x = tl.load(
                x_ptr + token[None, :] * x_stride + column[:, None],
                mask=token_valid[None, :] & inside[:, None],
                other=0.0,
            )
        if NORM:  # the norm's factor is one number per token: it is applied to the result
            wide = x.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            norm_weight = tl.load(norm_weight_ptr + column, mask=column < K, other=0.0).to(tl.float32)
            x = (wide * norm_weight[:, None]).to(weight.dtype)
        acc = dot(weight, x, acc)
        if SWIGLU:
            up_row = weight_row + N.to(tl.int64) * K
            if EVEN_K:
                up_weight = tl.load(up_row + column[None, :], mask=row_valid[:, None], other=0.0)
            else:
                up_weight = tl.load(up_row + column[None, :], mask=row_valid[:, None] & (column < K)[None, :], other=0.0)
            up_acc = dot(up_weight, x, up_acc)
    if NORM:
        factor = tl.rsqrt(squares / K + eps)[None, :]
        acc *= factor
        up_acc *= factor
    if SWIGLU:
        acc = acc * tl.sigmoid(acc) * up_acc
    if BIAS:
        acc += tl.load(bias_ptr + row, mask=row_valid, other=0.0).to(tl.float32)[:, None]
    valid = row_valid[:, None] & token_valid[None, :]
    place = token[None, :] * N + row[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=valid)


def _default_shape(features: int, width: int) -> SkinnyShape:
    return SkinnyShape(16 if features <= 2048 else 32, 256, 4, 3)


def skinny_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    next_weight: Tensor | None = None,
    prefetch_own: bool = True,
    shape: SkinnyShape | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T for M <= MAX_ROWS -> [M, N] in x's dtype. Arguments as in gemv.

    With norm_weight, x times the norm's weight is rounded to x's dtype before the norm's factor is applied: in float16
    that may overflow where the normed value would not, so use bfloat16 or float32.
    """
    tokens, width = x.shape
    features = weight.shape[0] // 2 if swiglu else weight.shape[0]
    assert 1 <= tokens <= MAX_ROWS and weight.shape[1] == width, (x.shape, weight.shape)
    assert x.stride(1) == 1 and weight.is_contiguous() and (residual is None or residual.is_contiguous())
    assert not (swiglu and bias is not None) and (norm_weight is None or x.dtype != torch.float16)
    out = torch.empty(tokens, features, dtype=x.dtype, device=x.device)
    block_features, block_width, num_warps, num_stages = shape or _default_shape(features, width)
    options = pdl_options(x)
    _skinny_matmul_kernel[(triton.cdiv(features, block_features),)](
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
        tokens,
        features,
        width,
        BLOCK_M=max(16, triton.next_power_of_2(tokens)),
        BLOCK_N=block_features,
        BLOCK_K=block_width,
        EVEN_K=width % block_width == 0,
        NORM=norm_weight is not None,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        PREFETCH=next_weight is not None and not INTERPRETED.value,
        PREFETCH_OWN=prefetch_own and bool(options["PDL"]) and weight.element_size() == 2,
        num_warps=num_warps,
        num_stages=num_stages,
        **options,
    )
    return out
