"""The streamed form of few_tokens_matmul, in Gluon (Triton's layer of explicit layouts), which has no interpreter.

One program multiplies a tile of weight rows with all tokens over its part of K. Its weights are on their way to shared
memory before it waits for the tokens; then tokens arrive in a ring of steps, each multiplied (wgmma) once it is there.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanoinfer.kernels.common import pdl_options
from nanoinfer.kernels.thread_barrier import thread_barrier


class StreamConfig(NamedTuple):
    features: int  # weight rows per program: 64 or 128
    tokens: int  # per program
    width: int  # elements of K per step
    splits: int  # programs that share a tile's K
    num_warps: int
    num_stages: int  # steps' tokens in shared memory at a time


@gluon.jit
def _stream_kernel(
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
    BLOCK_N: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    SWIGLU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    OUT_N: gl.constexpr = BLOCK_N // 2 if SWIGLU else BLOCK_N
    # Eight elements, 16 bytes, per thread and request.
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [WARPS, 1], [1, 0])
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [OUT_N // 8, 256 // OUT_N], [1, WARPS], [0, 1])
    ROW_WARPS: gl.constexpr = min(WARPS, BLOCK_N // 16)  # further warps take other tokens
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [ROW_WARPS, WARPS // ROW_WARPS], [16, BLOCK_M * ROW_WARPS // WARPS, 16]
    )
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_K], gl.bfloat16)
    TOKENS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], gl.bfloat16)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STEPS, BLOCK_N, BLOCK_K], WEIGHTS)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], TOKENS)
    split = gl.program_id(1)
    first_token = gl.program_id(2) * BLOCK_M
    first_feature = gl.program_id(0) * OUT_N

    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    if SWIGLU:  # as in few_tokens_matmul: eight gate rows, then their up rows, and so on
        row = gl.minimum(first_feature + lane // 16 * 8 + lane % 8, N - 1) + lane // 8 % 2 * N
    else:
        row = gl.minimum(first_feature + lane, N - 1)
    column = split * (STEPS * BLOCK_K) + gl.arange(0, BLOCK_K, gl.SliceLayout(0, COPY))
    weight_at = weight_ptr + (row.to(gl.int64) * K)[:, None] + column[None, :]
    for step in gl.static_range(STEPS):
        async_copy.async_copy_global_to_shared(weights.index(step), weight_at + step * BLOCK_K)
    async_copy.commit_group()
    if PDL:
        gdc_wait()

    token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(1, COPY))
    x_at = x_ptr + (token.to(gl.int64) * x_stride)[:, None] + column[None, :]
    there = gl.broadcast((token < M)[:, None], x_at)[0]  # other columns of the product hold anything
    for step in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(tokens.index(step), x_at + step * BLOCK_K, mask=there)
        async_copy.commit_group()
    feature = first_feature + gl.arange(0, OUT_N, gl.SliceLayout(1, OUT))
    out_token = first_token + gl.arange(0, BLOCK_M, gl.SliceLayout(0, OUT))
    place = out_token.to(gl.int64)[None, :] * N + feature[:, None]
    valid = (feature < N)[:, None] & (out_token < M)[None, :]
    if RESIDUAL:  # needed last, but then it would be waited for
        residual = gl.load(residual_ptr + place, mask=valid, other=0.0)
    acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, SUMS)
    for step in gl.static_range(STEPS):
        async_copy.wait_group(STAGES - 1)  # the weights, and this step's tokens
        fence_async_shared()
        thread_barrier()
        x = tokens.index(step % STAGES).permute((1, 0))
        acc = warpgroup_mma(weights.index(step), x, acc, is_async=True)
        if step + STAGES < STEPS:
            acc = warpgroup_mma_wait(0, deps=[acc])
            thread_barrier()  # no warp reads the slot any more
            ahead = x_at + (step + STAGES) * BLOCK_K
            async_copy.async_copy_global_to_shared(tokens.index(step % STAGES), ahead, mask=there)
        async_copy.commit_group()  # an empty one keeps the count
    acc = warpgroup_mma_wait(0, deps=[acc])

    tile = gl.program_id(2) * gl.num_programs(0) + gl.program_id(0)
    sum_row = gl.arange(0, BLOCK_N, gl.SliceLayout(1, SUMS))
    sum_token = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SUMS))
    part_ptr = partial_ptr + tile * (SPLITS * BLOCK_N * BLOCK_M) + sum_row[:, None] * BLOCK_M + sum_token[None, :]
    last = True
    if SPLITS > 1:
        gl.store(part_ptr + split * (BLOCK_N * BLOCK_M), acc)
        thread_barrier()  # all threads' stores come before the release
        last = gl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        if SPLITS > 1:
            thread_barrier()
            acc = gl.load(part_ptr, cache_modifier=".cg")  # written by other programs: not from this core's L1
            for other in gl.static_range(1, SPLITS):
                acc += gl.load(part_ptr + other * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
            gl.store(counters_ptr + tile, 0)
        if SWIGLU:
            gate, up = gl.split(acc.reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute(0, 2, 3, 1))
            one = gate / (1.0 + gl.exp(-gate)) * up
            out = gl.convert_layout(one.reshape([OUT_N, BLOCK_M]), OUT)
        else:
            out = gl.convert_layout(acc, OUT)
        if BIAS:
            out += gl.load(bias_ptr + feature, mask=feature < N, other=0.0).to(gl.float32)[:, None]
        if RESIDUAL:
            out += residual.to(gl.float32)
        gl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=valid)


def shared_bytes(config: StreamConfig, width: int) -> int:
    return 2 * (config.features * width // config.splits + config.num_stages * config.tokens * config.width)


def stream(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    partial: Tensor,
    counters: Tensor,
    grid: tuple[int, int, int],
    swiglu: bool,
    config: StreamConfig,
) -> None:
    """Write few_tokens_matmul's result to out [M, N]; x and weight are bfloat16, and the splits cut K evenly."""
    width = x.shape[1]
    steps = width // (config.splits * config.width)
    assert width == steps * config.splits * config.width, (width, config)
    assert x.element_size() == weight.element_size() == 2
    if x.stride(0) % 16 or x.data_ptr() % 16:
        x = x.contiguous()  # it is copied in pieces of 16 bytes
    _stream_kernel[grid](
        x,
        weight,
        bias,
        residual,
        out,
        partial,
        counters,
        x.stride(0),
        x.shape[0],
        out.shape[1],
        width,
        BLOCK_N=config.features,
        BLOCK_M=config.tokens,
        BLOCK_K=config.width,
        STEPS=steps,
        SPLITS=config.splits,
        STAGES=min(config.num_stages, steps),
        SWIGLU=swiglu,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=config.num_warps,
        **pdl_options(x),
    )
