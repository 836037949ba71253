"""Paged attention for one query per sequence: split over the history (flash-decoding), query heads packed by KV head.

One program handles one KV head of one split of one sequence, so every key and value is read once for all the query
heads that share it (grouped-query attention). The number of splits is fixed by the launch; how long a split is, and
how many have work, is decided on the device from the sequence's length, so a CUDA graph serves every length. The last
program of a sequence to finish combines the splits.

The fused form also does what lies between the QKV projection and attention (QK-norm, rotary embedding, KV write): the
program whose split ends with the newest token stores that token first. While it waits for the projection it already
reads lengths, tables and slots, which are the step's inputs (`common`). For a few sequences this form has a kernel of
its own, `few_decodes_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import LOG2_E, enter, pdl_options, wait_for_inputs
from nanoinfer.kernels.decode_parts import COMBINE, attend, cache_rows, finish_split, load_rows, normed_rotated
from nanoinfer.kernels.decode_splits import MIN_SPLIT_TOKENS, DecodeConfig, DecodeWorkspace, default_config
from nanoinfer.kernels.rope import load_rotation


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,  # [B, H, D]; FUSED: qkv [B, (H + 2 KV) * D] before norm and rotation
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
    split_tokens_ptr,  # EQUAL_SPLITS: [1] tokens that a split should have
    eps,
    scale,  # of the scores, times log2(e)
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,  # query heads per KV head
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    MIN_SPLIT_TOKENS: tl.constexpr,
    COMBINE: tl.constexpr,
    COMBINE_G: tl.constexpr,
    FUSED: tl.constexpr,
    NORM: tl.constexpr,
    EQUAL_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    splits = tl.num_programs(1)
    if not FUSED:
        wait_for_inputs(PDL)
    length = tl.load(lengths_ptr + sequence).to(tl.int32)
    if FUSED:
        slot = tl.load(slots_ptr + sequence).to(tl.int64)
        length = tl.where(slot < 0, 0, length)
    if EQUAL_SPLITS:  # as many splits as the common length gives, of equal size
        splits_used = tl.minimum(tl.maximum(tl.cdiv(length, tl.load(split_tokens_ptr)), 1), splits)
    else:
        splits_used = splits
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(length, splits_used), BLOCK_T) * BLOCK_T, MIN_SPLIT_TOKENS)
    active = tl.maximum(tl.cdiv(length, split_tokens), 1)  # a padding row of length 0 still writes its zeros
    if split < active:
        group = tl.arange(0, BLOCK_G)
        lane = tl.arange(0, BLOCK_D)
        group_valid = group < G
        lane_valid = lane < D
        top = tl.full([BLOCK_G], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_G], tl.float32)
        acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
        begin = split * split_tokens
        end = tl.minimum(begin + split_tokens, length)
        table_ptr = tables_ptr + sequence * table_stride

        head = kv_head * G + group
        if FUSED:
            row_ptr = q_ptr + sequence * ((KV * G + 2 * KV) * D)
            cos, sin = load_rotation(cos_sin_ptr + tl.maximum(length - 1, 0).to(tl.int64) * D, D, BLOCK_D)
            wait_for_inputs(PDL)
            q = normed_rotated(row_ptr, head, group_valid, q_weight_ptr, cos, sin, eps, D, BLOCK_D, NORM)
            if (split == active - 1) & (slot >= 0):
                one = tl.arange(0, 1)
                key = normed_rotated(
                    row_ptr, KV * G + kv_head + one, one == 0, k_weight_ptr, cos, sin, eps, D, BLOCK_D, NORM
                )
                value = tl.load(row_ptr + (KV * G + KV + kv_head) * D + lane, mask=lane_valid, other=0.0)
                cache_row = (slot * KV + kv_head) * D + lane
                tl.store(k_cache_ptr + cache_row[None, :], key, mask=lane_valid[None, :])
                tl.store(v_cache_ptr + cache_row, value, mask=lane_valid)
                tl.debug_barrier()  # this program reads them below
        else:
            q_row = sequence * (KV * G) + head
            q = tl.load(
                q_ptr + q_row[:, None] * D + lane[None, :], mask=group_valid[:, None] & lane_valid[None, :], other=0.0
            )

        for start in range(begin, end, BLOCK_T):
            row, valid = cache_rows(table_ptr, start, end, kv_head, KV, BLOCK_SIZE, BLOCK_T)
            k, v = load_rows(k_cache_ptr, v_cache_ptr, row, valid, D, BLOCK_D)
            top, total, acc = attend(q, k, v, valid, scale, top, total, acc)

        finish_split(
            top, total, acc, group, group_valid, out_ptr, partial_ptr, stats_ptr,
            counters_ptr + sequence * KV + kv_head, sequence * (KV * G) + kv_head * G, split, splits, active,
            G, COMBINE_G, D, BLOCK_D, COMBINE,
        )  # fmt: skip


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float,
    num_heads: int,
    workspace: DecodeWorkspace,
    config: DecodeConfig | None,
    min_split_tokens: int,
    split_tokens: Tensor | None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    cos_sin: Tensor | None = None,
    slot_mapping: Tensor | None = None,
) -> Tensor:
    """The fused form where there is a cos_sin: q is then the whole qkv."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    batch, queries_per_kv = q.shape[0], num_heads // num_kv_heads
    assert q.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert block_tables.stride(1) == 1, block_tables.stride()
    assert queries_per_kv * num_kv_heads == num_heads
    out = torch.empty(batch, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if batch == 0:
        return out
    config = config or default_config(batch, num_kv_heads, q.device, q.dtype)
    workspace.check(batch, num_heads, num_kv_heads, head_dim, config)
    fused = cos_sin is not None
    _decode_kernel[(num_kv_heads, config.splits, batch)](
        q,
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
        split_tokens,
        eps,
        scale * LOG2_E,
        block_tables.stride(0),
        KV=num_kv_heads,
        G=queries_per_kv,
        D=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=max(16, triton.next_power_of_2(queries_per_kv)),  # 16: the smallest tensor-core tile
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_T=config.block_tokens,
        MIN_SPLIT_TOKENS=max(min_split_tokens, config.block_tokens),
        COMBINE=COMBINE,
        COMBINE_G=triton.next_power_of_2(queries_per_kv),
        FUSED=fused,
        NORM=q_weight is not None,
        EQUAL_SPLITS=split_tokens is not None,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **pdl_options(q),
    )
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    *,
    config: DecodeConfig | None = None,
    min_split_tokens: int = MIN_SPLIT_TOKENS,
    split_tokens: Tensor | None = None,
) -> Tensor:
    """q [B, heads, D], one token per sequence -> like q. The KV of all context_lens [B] tokens is in the cache.

    The unfused form, of which an engine needs only that of the last layer of a large step (decision 065).
    block_tables int [B, max_blocks]. A row of length 0 (padding) gives zeros. `config` and `min_split_tokens` are for
    tests and tuning; split_tokens is what `decode_splits.split_tokens` says.
    """
    return _launch(
        q,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale=scale,
        num_heads=q.shape[1],
        workspace=workspace,
        config=config,
        min_split_tokens=min_split_tokens,
        split_tokens=split_tokens,
    )


def fused_decode_attention(
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
    min_split_tokens: int = MIN_SPLIT_TOKENS,
    split_tokens: Tensor | None = None,
) -> Tensor:
    """QK-norm (if weights [D] are given), rotation at context_lens - 1, KV write and attention, all for one token each.

    qkv [B, (heads + 2 kv_heads) * D] -> [B, heads, D]. context_lens [B] counts this token. A row with slot -1 or length
    0 is padding: it stores nothing and gives zeros. The rest as in `decode_attention`.
    """
    return _launch(
        qkv,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        scale=scale,
        num_heads=num_heads,
        workspace=workspace,
        config=config,
        min_split_tokens=min_split_tokens,
        split_tokens=split_tokens,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=eps,
        cos_sin=cos_sin,
        slot_mapping=slot_mapping,
    )
