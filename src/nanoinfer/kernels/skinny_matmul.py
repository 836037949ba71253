"""Products of a few tokens with a weight on the tensor cores, with SwiGLU and residual fused in.

Bandwidth decides: every weight is read once, and all of a program's weights are under way (to shared memory) before it
waits for the tokens. The width K is cut among the warps, each of which multiplies its part for all features of the
program; the parts are added at the end. So a program needs few features to keep all its warps busy, and the grid is
wide enough for the memory even where the weight has only a thousand rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import dot, enter, pdl_options, product_sizes, shared_memory, wait_for_inputs
from nanoinfer.kernels.norm import rms_norm

MAX_TOKENS = 32  # beyond, the tokens no longer fit beside the weights
SHARED_RESERVE = 27 * 1024  # bytes per program that the compiler may take for conversions between layouts


class SkinnyConfig(NamedTuple):
    features: int  # output features per program
    num_warps: int
    width: int  # elements of K that one warp multiplies in one step


SMALLEST = SkinnyConfig(8, 4, 128)


@triton.jit
def _skinny_matmul_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2N, K] with SWIGLU: N gate rows, then N up rows
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    x_stride,
    M,
    N,
    K,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    row_valid = row < N
    token_valid = token < M
    part_column = tl.arange(0, PARTS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]  # [PARTS, BLOCK_K]
    weight_row = weight_ptr + row.to(tl.int64)[None, None, :] * K
    weights = ()
    up_weights = ()
    for step in tl.static_range(STEPS):
        column = step * PARTS * BLOCK_K + part_column
        inside = column < K
        valid = inside[:, :, None] & row_valid[None, None, :]
        weights += (tl.load(weight_row + column[:, :, None], mask=valid, other=0.0),)  # type: ignore[assignment]
        if SWIGLU:
            up_row = weight_row + N.to(tl.int64) * K
            up_weights += (tl.load(up_row + column[:, :, None], mask=valid, other=0.0),)  # type: ignore[assignment]
    wait_for_inputs(PDL)

    acc = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
    up_acc = tl.zeros([PARTS, BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.static_range(STEPS):
        column = step * PARTS * BLOCK_K + part_column
        x = tl.load(
            x_ptr + token[None, :, None] * x_stride + column[:, None, :],
            mask=token_valid[None, :, None] & (column < K)[:, None, :],
            other=0.0,
        )
        acc = dot(x, weights[step], acc)
        if SWIGLU:
            up_acc = dot(x, up_weights[step], up_acc)
    out = tl.sum(acc, axis=0)
    if SWIGLU:
        out = out * tl.sigmoid(out) * tl.sum(up_acc, axis=0)
    if BIAS:
        out += tl.load(bias_ptr + row, mask=row_valid, other=0.0).to(tl.float32)[None, :]
    valid = token_valid[:, None] & row_valid[None, :]
    place = token.to(tl.int64)[:, None] * N + row[None, :]
    if RESIDUAL:
        out += tl.load(residual_ptr + place, mask=valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=valid)


def _block_tokens(tokens: int) -> int:
    return max(16, int(triton.next_power_of_2(tokens)))  # 16: the smallest tensor-core tile


def _shared_bytes(config: SkinnyConfig, tokens: int, width: int, swiglu: bool) -> int:
    """All weights of a program, and one step's tokens."""
    step = config.num_warps * config.width
    weights = config.features * (1 + swiglu) * -(-width // step) * step
    return 2 * (weights + _block_tokens(tokens) * step)


def _default_config(features: int, width: int, swiglu: bool, tokens: int, limit: int) -> SkinnyConfig:
    """Measured on an H200; smaller where the weights of a program would not fit into `limit` bytes."""
    wide = SkinnyConfig(32, 4, 256)
    if features >= 4096 and not swiglu and _shared_bytes(wide, tokens, width, swiglu) <= min(limit, 100 * 1024):
        return wide
    for config in (SkinnyConfig(16, 4, 256), SkinnyConfig(8, 4, 256)):
        if _shared_bytes(config, tokens, width, swiglu) <= limit:
            return config
    return SMALLEST


def _shared_limit(device: torch.device) -> int:
    return shared_memory(device) - SHARED_RESERVE


def fits(tokens: int, weight: Tensor, swiglu: bool = False) -> bool:
    """Whether a product of this size can be computed here: a program's weights must fit into shared memory."""
    needed = _shared_bytes(SMALLEST, tokens, weight.shape[1], swiglu)
    return tokens <= MAX_TOKENS and needed <= _shared_limit(weight.device)


def pays(tokens: int, weight: Tensor) -> bool:
    """Whether it beats cuBLAS, which reads weights of more than 16 MB at the memory's speed itself (H200)."""
    small = weight.numel() <= 2**23 and weight.element_size() == 2
    # With few features cuBLAS cuts K and adds the parts in a kernel of its own, so ours wins for longer.
    most = 16 if weight.shape[0] > 2048 else MAX_TOKENS
    return tokens <= most and small and fits(tokens, weight, swiglu=True)


def skinny_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    config: SkinnyConfig | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T for M <= MAX_TOKENS -> [M, N] in out_dtype (x's if None). Arguments as in gemv.

    The norm is a kernel of its own: here, every program would have to repeat it for all tokens.
    """
    tokens, width, features = product_sizes(x, weight, bias, residual, swiglu=swiglu)
    assert 1 <= tokens <= MAX_TOKENS, x.shape
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    out = torch.empty(tokens, features, dtype=out_dtype or x.dtype, device=x.device)
    block_features, num_warps, block_width = config or _default_config(
        features, width, swiglu, tokens, _shared_limit(x.device)
    )
    _skinny_matmul_kernel[(triton.cdiv(features, block_features),)](
        x,
        weight,
        bias,
        residual,
        out,
        x.stride(0),
        tokens,
        features,
        width,
        PARTS=num_warps,
        STEPS=triton.cdiv(width, num_warps * block_width),
        BLOCK_M=_block_tokens(tokens),
        BLOCK_N=block_features,
        BLOCK_K=block_width,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=num_warps,
        **pdl_options(x),
    )
    return out
