"""The fused form of decode attention for a few sequences, where latency is its time: next to nothing after the wait.

With few sequences there are few bytes to read and cores enough. What counts then is the way from the result of the
QKV projection to that of attention, and most of it are the instructions that one warp executes (decision 066). So a
split's first keys and values are loaded before the wait; queries are normed and rotated in as many rows as there are,
and repeated to fill a tensor core's tile only then; the newest token is attended to from registers, not through the
cache; and the loop over further tiles, whose first loads come ahead of it, is left out where there are none.

Read before the wait: lengths, tables and slots, which are the step's inputs, and keys and values of earlier steps alone
(`common`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import INTERPRETED, LOG2_E, enter, pdl_options, wait_for_inputs
from nanoinfer.kernels.decode_parts import COMBINE, attend, cache_rows, finish_split, load_rows, normed_rotated
from nanoinfer.kernels.decode_splits import DecodeConfig, DecodeWorkspace, num_splits
from nanoinfer.kernels.rope import load_rotation


@triton.jit
def _prefetch_rows(k_cache_ptr, v_cache_ptr, row, valid, D: tl.constexpr):
    """Ask for these rows of keys and values to be brought into L2."""
    SECTOR: tl.constexpr = 16  # bfloat16 elements in the 32 bytes that a request brings at the least
    offset = tl.where(valid, row * D, 0)[:, None] + (tl.arange(0, 8) * SECTOR % D)[None, :]
    for i in tl.static_range(2):
        base = k_cache_ptr if i == 0 else v_cache_ptr
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [(base + offset).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["table_stride"])
def _few_decodes_kernel(
    qkv_ptr,  # [B, (H + 2 KV) * D] before norm and rotation
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_sin_ptr,  # [positions, D] float32
    slots_ptr,  # [B]
    k_cache_ptr,  # [blocks, BLOCK_SIZE, KV, D]
    v_cache_ptr,
    tables_ptr,  # [B, max_blocks]
    lengths_ptr,  # [B]
    out_ptr,  # [B, H, D]
    partial_ptr,  # [B, H, splits, D] float32
    stats_ptr,  # [B, H, splits, 2] float32
    counters_ptr,  # [B, KV] int32, zero between launches
    eps,
    scale,  # of the scores, times log2(e)
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,  # power of two >= G
    REPEAT: tl.constexpr,  # rows of a tensor core's tile for each of BLOCK_G heads
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    COMBINE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    length = tl.where(slot < 0, 0, tl.load(lengths_ptr + sequence).to(tl.int32))
    history = tl.maximum(length - 1, 0)
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(history, splits), BLOCK_T), 1) * BLOCK_T
    active = tl.maximum(tl.cdiv(history, split_tokens), 1)  # a padding row of length 0 still writes its zeros
    if split < active:
        lane = tl.arange(0, BLOCK_D)
        lane_valid = lane < D
        table_ptr = tables_ptr + sequence * table_stride
        begin = split * split_tokens
        end = tl.minimum(begin + split_tokens, history)
        first_row, first_valid = cache_rows(table_ptr, begin, end, kv_head, KV, BLOCK_SIZE, BLOCK_T)
        first_k, first_v = load_rows(k_cache_ptr, v_cache_ptr, first_row, first_valid, D, BLOCK_D)
        if not INTERPRETED:
            for start in range(begin + BLOCK_T, end, BLOCK_T):
                next_row, next_valid = cache_rows(table_ptr, start, end, kv_head, KV, BLOCK_SIZE, BLOCK_T)
                _prefetch_rows(k_cache_ptr, v_cache_ptr, next_row, next_valid, D)
        cos, sin = load_rotation(cos_sin_ptr + history.to(tl.int64) * D, D, BLOCK_D)
        wait_for_inputs(PDL)

        token_ptr = qkv_ptr + sequence * ((KV * G + 2 * KV) * D)
        head = tl.arange(0, BLOCK_G)
        heads = normed_rotated(
            token_ptr, kv_head * G + head, head < G, q_weight_ptr, cos, sin, eps, D, BLOCK_D, NORM
        )  # fmt: skip
        one = tl.arange(0, 1)
        key = normed_rotated(
            token_ptr, KV * G + kv_head + one, one == 0, k_weight_ptr, cos, sin, eps, D, BLOCK_D, NORM
        )  # fmt: skip
        newest = (split == active - 1) & (length > 0)  # this split ends with the newest token
        value = tl.load(token_ptr + (KV * G + KV + kv_head) * D + lane, mask=lane_valid & newest, other=0.0)
        slot_row = (slot * KV + kv_head) * D + lane
        tl.store(k_cache_ptr + slot_row[None, :], key, mask=lane_valid[None, :] & newest)
        tl.store(v_cache_ptr + slot_row, value, mask=lane_valid & newest)

        score = tl.sum(heads.to(tl.float32) * key.to(tl.float32), axis=1) * scale
        score = tl.where(newest, score, tl.where(length > 0, float("-inf"), 0.0))
        top = tl.reshape(tl.broadcast_to(score[:, None], [BLOCK_G, REPEAT]), [BLOCK_G * REPEAT])
        total = tl.where(newest, 1.0, 0.0) + tl.zeros([BLOCK_G * REPEAT], tl.float32)
        acc = value.to(tl.float32)[None, :] + tl.zeros([BLOCK_G * REPEAT, BLOCK_D], tl.float32)
        q = tl.reshape(tl.broadcast_to(heads[:, None, :], [BLOCK_G, REPEAT, BLOCK_D]), [BLOCK_G * REPEAT, BLOCK_D])
        top, total, acc = attend(q, first_k, first_v, first_valid, scale, top, total, acc)
        begin += BLOCK_T
        if begin < end:
            for start in range(begin, end, BLOCK_T):
                row, valid = cache_rows(table_ptr, start, end, kv_head, KV, BLOCK_SIZE, BLOCK_T)
                k, v = load_rows(k_cache_ptr, v_cache_ptr, row, valid, D, BLOCK_D)
                top, total, acc = attend(q, k, v, valid, scale, top, total, acc)

        own_head = tl.arange(0, BLOCK_G * REPEAT) // REPEAT
        stored = (own_head < G) & (tl.arange(0, BLOCK_G * REPEAT) % REPEAT == 0)
        finish_split(
            top, total, acc, own_head, stored, out_ptr, partial_ptr, stats_ptr,
            counters_ptr + sequence * KV + kv_head, sequence * (KV * G) + kv_head * G, split, splits, active,
            G, BLOCK_G, D, BLOCK_D, COMBINE,
        )  # fmt: skip


def few_decodes_attention(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    num_heads: int,
    workspace: DecodeWorkspace,
    *,
    config: DecodeConfig | None = None,
) -> Tensor:
    """`fused_decode_attention` for batches that `decode_splits.is_small` says."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    batch, queries_per_kv = qkv.shape[0], num_heads // num_kv_heads
    for tensor in (qkv, k_cache, v_cache, cos_sin):
        assert tensor.is_contiguous(), tensor.stride()
    assert block_tables.stride(1) == 1, block_tables.stride()
    assert queries_per_kv * num_kv_heads == num_heads
    out = torch.empty(batch, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if batch == 0:
        return out
    config = config or _default_config(batch, num_kv_heads, qkv.device, qkv.dtype)
    workspace.check(batch, num_heads, num_kv_heads, head_dim, config)
    block_heads = triton.next_power_of_2(queries_per_kv)
    _few_decodes_kernel[(num_kv_heads, config.splits, batch)](
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        slot_mapping,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        out,
        workspace.partial,
        workspace.stats,
        workspace.counters,
        eps,
        scale * LOG2_E,
        block_tables.stride(0),
        KV=num_kv_heads,
        G=queries_per_kv,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=block_heads,
        REPEAT=max(1, 16 // block_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_T=config.block_tokens,
        COMBINE=COMBINE,
        NORM=q_weight is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(qkv),
    )
    return out


def _default_config(batch: int, num_kv_heads: int, device: torch.device, dtype: torch.dtype) -> DecodeConfig:
    """Measured on an H200: two warps have the fewest barriers without too many instructions each."""
    splits = num_splits(batch, num_kv_heads, device)
    return DecodeConfig(32, 4, 2, splits) if dtype == torch.float32 else DecodeConfig(64, 2, 2, splits)
