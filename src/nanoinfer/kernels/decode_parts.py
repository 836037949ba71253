"""What the two decode-attention kernels share: reading a tile of a paged cache, online softmax, combining splits."""

from __future__ import annotations

import triton
import triton.language as tl

from nanoinfer.kernels.common import dot
from nanoinfer.kernels.rope import load_with_partner, norm_and_rotate

COMBINE = 8  # splits combined at a time


@triton.jit
def cache_rows(table_ptr, start, end, kv_head, KV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where a KV head's tokens from position `start` on lie, in rows of head_dim elements, and which are before `end`.

    Both [BLOCK_T]; int64, since a cache has more than 2^31 elements.
    """
    position = start + tl.arange(0, BLOCK_T)
    valid = position < end
    block = tl.load(table_ptr + position // BLOCK_SIZE, mask=valid, other=0).to(tl.int64)
    return (block * BLOCK_SIZE + position % BLOCK_SIZE) * KV + kv_head, valid


@triton.jit
def load_rows(k_cache_ptr, v_cache_ptr, row, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys and values [BLOCK_T, BLOCK_D]; 0 where invalid, since what was never written may be NaN."""
    lane = tl.arange(0, BLOCK_D)
    offset = row[:, None] * D + lane[None, :]
    mask = valid[:, None] & (lane < D)[None, :]
    return tl.load(k_cache_ptr + offset, mask=mask, other=0.0), tl.load(v_cache_ptr + offset, mask=mask, other=0.0)


@triton.jit
def attend(q, k, v, valid, scale, top, total, acc):
    """A tile's part of online softmax: the scores' maximum so far (base 2) [R], their sum [R], values [R, BLOCK_D].

    At least one token of the tile is valid, or top is finite.
    """
    scores = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], tl.float32))
    scores = tl.where(valid[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weight = tl.exp2(scores * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    acc = dot(weight.to(v.dtype), v, acc * decay[:, None])
    return new_top, total * decay + tl.sum(weight, axis=1), acc


@triton.jit
def normed_rotated(
    row_ptr, head, valid, weight_ptr, cos, sin, eps, D: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr
):
    """Heads [R] of one token's qkv row, normed and rotated, in the row's dtype: [R, BLOCK_D]."""
    own, other = load_with_partner(row_ptr + head * D, valid, D, BLOCK_D)
    if NORM:
        weight, other_weight = load_with_partner(weight_ptr + head * 0, valid, D, BLOCK_D)
        rotated = norm_and_rotate(own, other, weight, other_weight, cos, sin, eps, D, NORM)
    else:
        rotated = norm_and_rotate(own, other, own, other, cos, sin, eps, D, NORM)
    return rotated.to(own.dtype)


@triton.jit
def combine_splits(
    partial_ptr,  # this sequence's first head: [G, splits, D] float32
    stats_ptr,  # [G, splits, 2]: running maximum (base 2) and sum
    out_ptr,  # [G, D]
    active,
    splits,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COMBINE: tl.constexpr,
):
    head = tl.arange(0, BLOCK_G)
    lane = tl.arange(0, BLOCK_D)
    valid = (head < G)[:, None] & (lane < D)[None, :]
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for first in range(0, active, COMBINE):
        split = first + tl.arange(0, COMBINE)
        row = head[:, None] * splits + split[None, :]
        row_valid = (head < G)[:, None] & (split < active)[None, :]
        # Written by other programs of this launch, so the read must not be served by this core's L1.
        split_top = tl.load(stats_ptr + row * 2, mask=row_valid, other=float("-inf"), cache_modifier=".cg")
        split_total = tl.load(stats_ptr + row * 2 + 1, mask=row_valid, other=0.0, cache_modifier=".cg")
        part = tl.load(
            partial_ptr + row[:, :, None] * D + lane[None, None, :],
            mask=row_valid[:, :, None] & (lane < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(split_top, axis=1))
        finite = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(split_top - finite[:, None])
        decay = tl.exp2(top - finite)
        total = total * decay + tl.sum(split_total * weight, axis=1)
        acc = acc * decay[:, None] + tl.sum(part * weight[:, :, None], axis=1)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + head[:, None] * D + lane[None, :], out, mask=valid)


@triton.jit
def finish_split(
    top, total, acc, head, stored, out_ptr, partial_ptr, stats_ptr, counter_ptr, first_head, split, splits, active,
    G: tl.constexpr, BLOCK_G: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, COMBINE: tl.constexpr,
):  # fmt: skip
    """The answer of a sequence's only split, or a part: the last program to arrive combines the parts of all.

    Rows [R] that are `stored` are those of query `head` of this KV head, the first of which is first_head of the batch.
    """
    lane = tl.arange(0, BLOCK_D)
    mask = stored[:, None] & (lane < D)[None, :]
    if active == 1:
        out = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first_head + head)[:, None] * D + lane[None, :], out, mask=mask)
    else:
        part = (first_head + head) * splits + split
        tl.store(partial_ptr + part[:, None] * D + lane[None, :], acc, mask=mask)
        tl.store(stats_ptr + part * 2, top, mask=stored)
        tl.store(stats_ptr + part * 2 + 1, total, mask=stored)
        tl.debug_barrier()  # all threads' stores come before the release
        arrived = tl.atomic_add(counter_ptr, 1, sem="acq_rel")
        if arrived == active - 1:
            tl.debug_barrier()
            combine_splits(
                partial_ptr + first_head * splits * D,
                stats_ptr + first_head * splits * 2,
                out_ptr + first_head * D,
                active,
                splits,
                G,
                BLOCK_G,
                D,
                BLOCK_D,
                COMBINE,
            )
            tl.store(counter_ptr, 0)
