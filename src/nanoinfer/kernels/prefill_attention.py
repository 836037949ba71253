"""Causal attention for many queries per sequence (FlashAttention-2, arXiv:2307.08691), packed sequences of any lengths.

Two sources of keys and values: this step's own tensors where no sequence has history (direct), and the paged cache.
A tile of queries is BLOCK_M rows that are (token, query head) pairs of one KV head, so that keys and values are read
once per group of heads, and a short chunk behind a long history still fills the tile. Whole tiles of keys, which every
row may see, run without any mask, through the tensor memory accelerator (TMA) where the layout allows it; only the
tiles at the diagonal and at the end are masked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanoinfer.kernels.common import LOG2_E, dot, enter, pdl_options, shared_memory, wait_for_inputs


class PrefillConfig(NamedTuple):
    block_rows: int
    block_keys: int
    num_warps: int
    num_stages: int
    use_tma: bool = True


@triton.jit
def _online_softmax(scores, scale, top, total):
    """One step of the running softmax (base 2): (weights, factor for what was summed before, new maximum, new sum)."""
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    return weights, decay, new_top, total * decay + tl.sum(weights, axis=1)


@triton.jit
def _prefill_kernel(
    q_ptr,  # [T, H, D], rows q_stride apart
    k_ptr,  # direct: [T, KV, D]; PAGED: [blocks, BLOCK_SIZE, KV, D]; rows of [KV, D] are kv_stride apart
    v_ptr,
    k_tiles,  # TMA: the same memory as [rows, KV * D] in tiles of [BLOCK_N, D]
    v_tiles,
    tables_ptr,  # PAGED: [B, max_blocks]
    cu_seqlens_ptr,  # [B + 1] cumulative numbers of queries
    lengths_ptr,  # PAGED: [B] history and queries
    out_ptr,  # [T, H, D]
    batch,
    scale,  # of the scores, times log2(e)
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    KV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr,
    TMA: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    wait_for_inputs(PDL)
    TOKENS: tl.constexpr = BLOCK_M // G  # per tile; the last BLOCK_M % G rows stay empty
    # Tiles of sequence i start at number cu_seqlens[i] // TOKENS + i, which leaves room for a partial tile. The last
    # tiles, whose histories are longest, run first, so that the short ones fill the end of the launch.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    low = batch * 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    sequence = low.to(tl.int64)
    first = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
    queries = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32) - first
    token0 = (tile - (first // TOKENS + low)) * TOKENS
    if token0 < queries:
        if PAGED:
            length = tl.load(lengths_ptr + sequence).to(tl.int32)
            table_ptr = tables_ptr + sequence * table_stride
        else:
            length = queries
        history = length - queries
        row = tl.arange(0, BLOCK_M)
        token = token0 + row // G
        lane = tl.arange(0, BLOCK_D)
        row_valid = (row < TOKENS * G) & (token < queries)
        valid = row_valid[:, None] & (lane < D)[None, :]
        head = kv_head * G + row % G
        q_row = (first + token).to(tl.int64)
        q = tl.load(q_ptr + (q_row * q_stride + head * D)[:, None] + lane[None, :], mask=valid, other=0.0)
        position = history + token  # of the query in its sequence

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        key = tl.arange(0, BLOCK_N)
        seen_by_all = (history + token0 + 1) // BLOCK_N * BLOCK_N
        end = history + tl.minimum(token0 + TOKENS, queries)

        if PAGED:  # block ids are read one tile ahead: a load that waits for another load is not pipelined well
            offset = 0 if TMA else key
            next_block = tl.load(table_ptr + offset // BLOCK_SIZE, mask=offset < seen_by_all, other=0)
        for start in tl.range(0, seen_by_all, BLOCK_N):
            start = tl.multiple_of(start, BLOCK_N)
            if PAGED:
                block = next_block
                ahead = start + BLOCK_N + offset
                next_block = tl.load(table_ptr + ahead // BLOCK_SIZE, mask=ahead < seen_by_all, other=0)
            if TMA:
                if PAGED:
                    first_row = block * BLOCK_SIZE + start % BLOCK_SIZE
                else:
                    first_row = first + start
                k = k_tiles.load([first_row, kv_head * D])
                v = v_tiles.load([first_row, kv_head * D])
            else:
                if PAGED:
                    kv_row = block.to(tl.int64) * BLOCK_SIZE + (start + key) % BLOCK_SIZE
                else:
                    kv_row = (first + start + key).to(tl.int64)
                k_at = k_ptr + (kv_row * k_stride + kv_head * D)[:, None] + lane[None, :]
                v_at = v_ptr + (kv_row * v_stride + kv_head * D)[:, None] + lane[None, :]
                if D == BLOCK_D:
                    k = tl.load(k_at)
                    v = tl.load(v_at)
                else:
                    k = tl.load(k_at, mask=(lane < D)[None, :], other=0.0)
                    v = tl.load(v_at, mask=(lane < D)[None, :], other=0.0)
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            weights, decay, top, total = _online_softmax(scores, scale, top, total)
            acc = dot(weights.to(v.dtype), v, acc * decay[:, None])

        for start in tl.range(seen_by_all, end, BLOCK_N):
            key_position = start + key
            inside = key_position < end
            if PAGED:
                last_block = tl.load(table_ptr + key_position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                kv_row = last_block * BLOCK_SIZE + key_position % BLOCK_SIZE
            else:
                kv_row = (first + key_position).to(tl.int64)
            # Beyond the end lie other sequences or slots never written (NaN): such values must be read as 0.
            kv_valid = inside[:, None] & (lane < D)[None, :]
            k = tl.load(k_ptr + (kv_row * k_stride + kv_head * D)[:, None] + lane[None, :], mask=kv_valid, other=0.0)
            v = tl.load(v_ptr + (kv_row * v_stride + kv_head * D)[:, None] + lane[None, :], mask=kv_valid, other=0.0)
            scores = dot(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
            # Rows past the last query look at every key, so that no row is without one.
            visible = inside[None, :] & ((key_position[None, :] <= position[:, None]) | (token >= queries)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            weights, decay, top, total = _online_softmax(scores, scale, top, total)
            acc = dot(weights.to(v.dtype), v, acc * decay[:, None])

        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (q_row * (KV * G * D) + head * D)[:, None] + lane[None, :], out, mask=valid)


def _default_config(max_rows: int, tma: bool, device: torch.device, dtype: torch.dtype) -> PrefillConfig:
    """max_rows: query heads per KV head times the longest number of queries. Measured on an H200."""
    if dtype == torch.float32:  # without tensor cores: a larger tile takes a minute to compile
        return PrefillConfig(32, 32, 4, 2, use_tma=False)
    stages = 3 if shared_memory(device) >= 160 * 1024 else 2  # at head dimension 128 three take 112 to 128 KB
    if tma or max_rows <= 256:
        return PrefillConfig(64, 64, 4, stages)
    return PrefillConfig(128, 64, 8, stages)


def _tma_layout(rows: Tensor) -> bool:
    """Whether [rows, KV, D] can be read by TMA, whose tiles are powers of two and aligned to 16 bytes."""
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return aligned and rows.shape[2] == triton.next_power_of_2(rows.shape[2])


def _launch(
    q: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    tables: Tensor | None,
    cu_seqlens_q: Tensor,
    lengths: Tensor | None,
    block_size: int,
    max_queries: int,
    scale: float,
    config: PrefillConfig | None,
) -> Tensor:
    """k_rows and v_rows [rows, KV, D]: one row per token, or per slot of the cache."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_rows.shape[1]
    queries_per_kv = num_heads // num_kv_heads
    batch = cu_seqlens_q.shape[0] - 1
    assert queries_per_kv * num_kv_heads == num_heads
    assert q.stride()[1:] == k_rows.stride()[1:] == v_rows.stride()[1:] == (head_dim, 1), (q.stride(), k_rows.stride())
    out = torch.empty(tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    if tokens == 0:
        return out
    paged = tables is not None
    tma = _tma_layout(k_rows) and _tma_layout(v_rows)
    if config is None:
        whole_tiles = tma and (not paged or block_size % 64 == 0)
        config = _default_config(queries_per_kv * max_queries, whole_tiles, q.device, q.dtype)
    rows, keys, num_warps, num_stages, use_tma = config
    tma = tma and use_tma and (not paged or block_size % keys == 0)
    k_tiles, v_tiles = (
        TensorDescriptor(t, [t.shape[0], num_kv_heads * head_dim], [t.stride(0), 1], [keys, head_dim]) if tma else None
        for t in (k_rows, v_rows)
    )
    _prefill_kernel[(tokens // (rows // queries_per_kv) + batch, num_kv_heads)](
        q,
        k_rows,
        v_rows,
        k_tiles,
        v_tiles,
        tables,
        cu_seqlens_q,
        lengths,
        out,
        batch,
        scale * LOG2_E,
        q.stride(0),
        k_rows.stride(0),
        v_rows.stride(0),
        tables.stride(0) if tables is not None else 0,
        KV=num_kv_heads,
        G=queries_per_kv,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_M=rows,
        BLOCK_N=keys,
        BLOCK_SIZE=block_size,
        PAGED=paged,
        TMA=tma,
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_options(q),
    )
    return out


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_queries: int,
    scale: float,
    *,
    config: PrefillConfig | None = None,
) -> Tensor:
    """Sequences without history: q [T, heads, D], k and v [T, kv_heads, D] (views of wider rows allowed) -> like q.

    Sequence i owns tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1; max_queries is the longest of them. Tokens that no
    sequence owns (after the last) are left undefined.
    """
    return _launch(q, k, v, None, cu_seqlens, None, 1, max_queries, scale, config)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    max_queries: int,
    scale: float,
    *,
    config: PrefillConfig | None = None,
) -> Tensor:
    """The last tokens of each sequence against all of it: q [T, heads, D] -> like q.

    Caches [num_blocks, block_size, kv_heads, D]; block_tables int [B, max_blocks]; cu_seqlens_q int [B + 1];
    context_lens int [B] counts history and this step's tokens, whose keys and values are in the cache already.
    """
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert block_tables.stride(1) == 1, block_tables.stride()
    k_rows, v_rows = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    block_size = k_cache.shape[1]
    return _launch(
        q, k_rows, v_rows, block_tables, cu_seqlens_q, context_lens, block_size, max_queries, scale, config
    )  # fmt: skip
