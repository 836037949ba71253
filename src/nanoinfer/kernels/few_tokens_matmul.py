"""Products of some tens of tokens with a weight: tiles of W x^T on the tensor cores, with SwiGLU and residual fused in.

Features are the rows of a tile and tokens its columns, so that few tokens do not leave a tensor-core instruction half
empty. Where the weight has few rows, K is cut among programs: each stores its float32 sums, and the last one of a tile
to arrive (an atomic counter, reset by the same program) adds them, always in the same order.

Two kernels, both asking for weights before they wait for the tokens (PDL):
* tiles: the compiler's software pipeline over K, its weights brought into L2 before the wait;
* streamed: all weights of a program go to shared memory before the wait, the tokens through a ring behind it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import INTERPRETED, dot, enter, is_hopper, pdl_options, product_sizes, wait_for_inputs
from nanoinfer.kernels.norm import rms_norm
from nanoinfer.kernels.streamed_matmul import StreamConfig, stream

MIN_TOKENS, MAX_TOKENS = 2, 128
SMALL, MEDIUM = 2**23, 13 * 2**20  # elements of a weight
PARTIAL_SUMS = 2**22  # float32, of all programs of one launch
TILES = 2**12


class TileConfig(NamedTuple):
    features: int  # weight rows per program
    tokens: int  # per program
    width: int  # elements of K per step
    splits: int  # programs that share a tile's K
    num_warps: int
    num_stages: int
    prefetch: bool = True  # weights into L2 before the wait


@triton.jit
def _prefetch_rows(row_ptr, BYTES: tl.constexpr):
    """Have BYTES from each of these addresses brought into L2."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], " + BYTES + "; mov.b32 $0, 0;",
        "=r,l",
        [row_ptr.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tile_kernel(
    x_ptr,  # [M, K]
    weight_ptr,  # [N, K], or [2N, K] with SWIGLU: N gate rows, then N up rows
    bias_ptr,  # [N]
    residual_ptr,  # [M, N]
    out_ptr,  # [M, N]
    partial_ptr,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    counters_ptr,  # [tiles] int32, zero between launches
    x_stride,
    M,
    N,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,  # K is a multiple of what the splits take
    PREFETCH: tl.constexpr,  # bytes that one request brings into L2, as text, or ""
    PREFETCHES: tl.constexpr,  # requests per row
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    split = tl.program_id(1)
    begin = split * (STEPS * BLOCK_K)
    # A row or token beyond the last is the last one again: computed, not stored.
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_N)
    if SWIGLU:  # eight gate rows, then their up rows, and so on: a thread's sums are of rows eight apart
        first_feature = tl.program_id(0) * (BLOCK_N // 2)
        feature = first_feature + tl.arange(0, BLOCK_N // 2)
        row = tl.minimum(first_feature + lane // 16 * 8 + lane % 8, N - 1) + lane // 8 % 2 * N
    else:
        first_feature = tl.program_id(0) * BLOCK_N
        feature = first_feature + lane
        row = tl.minimum(first_feature + lane, N - 1)
    weight_row = weight_ptr + row.to(tl.int64) * K
    x_row = x_ptr + tl.minimum(token, M - 1).to(tl.int64) * x_stride
    lane_k = tl.arange(0, BLOCK_K)
    if PREFETCH != "":
        piece = begin + tl.arange(0, PREFETCHES) * (STEPS * BLOCK_K // PREFETCHES)
        _prefetch_rows(weight_row[:, None] + piece[None, :], PREFETCH)
    valid = (feature < N)[:, None] & (token < M)[None, :]
    place = token.to(tl.int64)[None, :] * N + feature[:, None]
    wait_for_inputs(PDL)

    EARLY: tl.constexpr = BLOCK_N * BLOCK_M <= 64 * 64  # more would not fit into registers beside the sums
    if RESIDUAL and EARLY:  # needed last, but then it would be waited for
        residual = tl.load(residual_ptr + place, mask=valid, other=0.0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        column = begin + step * BLOCK_K + lane_k
        if EVEN:
            weight = tl.load(weight_row[:, None] + column[None, :])
            x = tl.load(x_row[:, None] + column[None, :])
        else:
            inside = (column < K)[None, :]
            weight = tl.load(weight_row[:, None] + column[None, :], mask=inside, other=0.0)
            x = tl.load(x_row[:, None] + column[None, :], mask=inside, other=0.0)
        acc = dot(weight, tl.trans(x), acc)

    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    part_ptr = partial_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + lane[:, None] * BLOCK_M
    part_ptr += tl.arange(0, BLOCK_M)[None, :]
    last = True
    if SPLITS > 1:
        tl.store(part_ptr + split * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all threads' stores come before the release
        last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            tl.debug_barrier()
            acc = tl.load(part_ptr, cache_modifier=".cg")  # written by other programs: not from this core's L1
            for other in tl.static_range(1, SPLITS):
                acc += tl.load(part_ptr + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            tl.store(counters_ptr + tile, 0)
        if SWIGLU:
            pairs = tl.permute(tl.reshape(acc, [BLOCK_N // 16, 2, 8, BLOCK_M]), [0, 2, 3, 1])
            gate, up = tl.split(pairs)
            out = tl.reshape(gate * tl.sigmoid(gate) * up, [BLOCK_N // 2, BLOCK_M])
        else:
            out = acc
        if BIAS:
            out += tl.load(bias_ptr + feature, mask=feature < N, other=0.0).to(tl.float32)[:, None]
        if RESIDUAL:
            if not EARLY:
                residual = tl.load(residual_ptr + place, mask=valid, other=0.0)
            out += residual.to(tl.float32)
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=valid)


def chosen_config(tokens: int, rows: int, width: int, swiglu: bool) -> TileConfig | StreamConfig | None:
    """For a weight [rows, width], as measured on an H200 (decision 056); None where cuBLAS or skinny_matmul is faster.

    That is where weights are large, and where no config cuts K evenly.
    """
    if rows * width > SMALL:
        is_medium = rows * width <= MEDIUM and rows <= 4096 and 16 < tokens <= 32
        return TileConfig(64, 32, 128, 4, 4, 4, prefetch=False) if is_medium and not swiglu else None
    long, short = -(-width // 1024), -(-width // 512)  # 64 rows of 1,024 fit into shared memory beside the tokens
    config: TileConfig | StreamConfig
    if tokens <= 32:
        columns = 16 if tokens <= 16 else 32
        config = (
            StreamConfig(64, columns, 256, 1, 4, 4) if width == 1024 else StreamConfig(64, columns, 128, long, 4, 8)
        )
    elif rows <= 2048:
        config = TileConfig(64, 64, 128, short if tokens <= 64 else long, 4, 4)
    elif swiglu and tokens > 64:
        config = TileConfig(64, 128, 128, 1, 4, 3)
    else:
        config = StreamConfig(64, 64, 128, long, 4, 4)
    if isinstance(config, StreamConfig) and width % (config.splits * config.width):
        return None
    return config


def pays(tokens: int, weight: Tensor, *, swiglu: bool = False) -> bool:
    """Whether it beats cuBLAS and skinny_matmul (H200). Only Hopper has these tensor-core instructions."""
    return (
        MIN_TOKENS <= tokens <= MAX_TOKENS
        and weight.dtype == torch.bfloat16
        and is_hopper(weight.device)
        and chosen_config(tokens, weight.shape[0], weight.shape[1], swiglu) is not None
    )


@cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of the splits and the tiles' counters, for all launches of a device, which one stream keeps apart."""
    partial = torch.empty(PARTIAL_SUMS, dtype=torch.float32, device=device)
    return partial, torch.zeros(TILES, dtype=torch.int32, device=device)


def _prefetch(config: TileConfig, steps: int, weight: Tensor) -> tuple[int, int]:
    """Requests per row of a program's weights, so that each thread makes one, and the bytes of each (0: none)."""
    pieces = max(1, 32 * config.num_warps // config.features)
    elements = steps * config.width // pieces
    usable = weight.shape[1] == elements * pieces * config.splits and elements * weight.element_size() % 16 == 0
    usable = usable and config.prefetch and not INTERPRETED.value
    return pieces, elements * weight.element_size() if usable and weight.data_ptr() % 16 == 0 else 0


def few_tokens_matmul(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    config: TileConfig | StreamConfig | None = None,
) -> Tensor:
    """x [M, K] @ weight [N, K].T -> [M, N] in out_dtype (x's if None). Arguments as in gemv."""
    tokens, width, features = product_sizes(x, weight, bias, residual, swiglu=swiglu)
    assert tokens >= 1, x.shape
    out = torch.empty(tokens, features, dtype=out_dtype or x.dtype, device=x.device)
    config = config or chosen_config(tokens, weight.shape[0], width, swiglu)
    assert config is not None, weight.shape
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps)
    partial, counters = _workspace(x.device)
    grid = (
        triton.cdiv(features * (1 + swiglu), config.features),
        config.splits,
        triton.cdiv(tokens, config.tokens),
    )
    assert grid[0] * grid[2] <= TILES, grid
    assert config.splits == 1 or grid[0] * grid[1] * grid[2] * config.features * config.tokens <= PARTIAL_SUMS, grid
    if isinstance(config, StreamConfig):
        stream(x, weight, bias, residual, out, partial, counters, grid, swiglu, config)
        return out
    steps = triton.cdiv(width, config.splits * config.width)
    pieces, piece_bytes = _prefetch(config, steps, weight)
    _tile_kernel[grid](
        x,
        weight,
        bias,
        residual,
        out,
        partial,
        counters,
        x.stride(0),
        tokens,
        features,
        width,
        BLOCK_N=config.features,
        BLOCK_M=config.tokens,
        BLOCK_K=config.width,
        STEPS=steps,
        SPLITS=config.splits,
        STAGES=config.num_stages,
        EVEN=width == steps * config.splits * config.width,
        PREFETCH=str(piece_bytes) if piece_bytes else "",
        PREFETCHES=pieces,
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=config.num_warps,
        **pdl_options(x),
    )
    return out
