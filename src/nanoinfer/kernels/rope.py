"""What lies between the QKV projection and attention, in one kernel: QK-norm, rotary embedding, the KV-cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, wait_for_inputs

HEADS_PER_PROGRAM = 8


@triton.jit
def load_rotation(cos_sin_ptr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """One position's cosines and signed sines for every lane, float32 [BLOCK_D]: y = x * cos + partner(x) * sin."""
    lane = tl.arange(0, BLOCK_D)
    first_half = lane < D // 2
    angle = tl.where(first_half, lane, lane - D // 2)
    cos = tl.load(cos_sin_ptr + angle, mask=lane < D, other=0.0)
    sin = tl.load(cos_sin_ptr + D // 2 + angle, mask=lane < D, other=0.0)
    return cos, tl.where(first_half, -sin, sin)


@triton.jit
def load_with_partner(ptr, valid, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [R, BLOCK_D] at ptr [R], and the same with each element replaced by the one that rotation pairs it with.

    Element i pairs with i +- D/2. Loading twice is cheaper than moving elements between threads. Lanes beyond D are 0.
    """
    lane = tl.arange(0, BLOCK_D)
    partner = tl.where(lane < D // 2, lane + D // 2, lane - D // 2)
    mask = valid[:, None] & (lane < D)[None, :]
    own = tl.load(ptr[:, None] + lane[None, :], mask=mask, other=0.0)
    return own, tl.load(ptr[:, None] + partner[None, :], mask=mask, other=0.0)


@triton.jit
def norm_and_rotate(own, other, weight, other_weight, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Heads [R, BLOCK_D] and their partners -> normed (if NORM) and rotated, float32."""
    x = own.to(tl.float32)
    partner = other.to(tl.float32)
    if NORM:  # rounded as the separate norm would round, so that both forms agree
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = (x * scale * weight.to(tl.float32)).to(own.dtype).to(tl.float32)
        partner = (partner * scale * other_weight.to(tl.float32)).to(own.dtype).to(tl.float32)
    return x * cos[None, :] + partner * sin[None, :]


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv_ptr,  # [T, (H + 2 KV) * D]
    q_weight_ptr,  # [D]
    k_weight_ptr,  # [D]
    cos_sin_ptr,  # [positions, D] float32
    positions_ptr,  # [T]
    slots_ptr,  # [T]
    q_ptr,  # [T, H, D]
    k_ptr,  # [T, KV, D]
    k_cache_ptr,  # [slots, KV, D]
    v_cache_ptr,
    eps,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    head_ptr = qkv_ptr + token * ((H + 2 * KV) * D) + head * D
    is_q = head < H
    is_k = (head >= H) & (head < H + KV)
    is_v = (head >= H + KV) & (head < H + 2 * KV)
    head_valid = head < H + 2 * KV
    raw, other = load_with_partner(head_ptr, head_valid, D, BLOCK_D)
    cos, sin = load_rotation(cos_sin_ptr + position * D, D, BLOCK_D)
    if NORM:
        weight_ptr = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        weight, other_weight = load_with_partner(weight_ptr, head_valid, D, BLOCK_D)
        rotated = norm_and_rotate(raw, other, weight, other_weight, cos, sin, eps, D, NORM)
    else:
        rotated = norm_and_rotate(raw, other, raw, other, cos, sin, eps, D, NORM)
    rotated = rotated.to(q_ptr.dtype.element_ty)
    lane = tl.arange(0, BLOCK_D)
    lane_valid = lane[None, :] < D
    tl.store(q_ptr + (token * H + head)[:, None] * D + lane[None, :], rotated, mask=is_q[:, None] & lane_valid)
    kv_head = head - H
    tl.store(k_ptr + (token * KV + kv_head)[:, None] * D + lane[None, :], rotated, mask=is_k[:, None] & lane_valid)
    stored = slot >= 0
    cached = (slot * KV + kv_head)[:, None] * D + lane[None, :]
    tl.store(k_cache_ptr + cached, rotated, mask=is_k[:, None] & lane_valid & stored)
    tl.store(v_cache_ptr + cached - KV * D, raw, mask=is_v[:, None] & lane_valid & stored)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, (heads + 2 kv_heads) * D], norm q and k per head if weights [D] are given, rotate, store k and v.

    Returns q [T, heads, D], k [T, kv_heads, D] and v, a view of qkv. A slot of -1 stores nothing.
    """
    tokens = qkv.shape[0]
    for tensor in (qkv, k_cache, v_cache, cos_sin):
        assert tensor.is_contiguous(), tensor.stride()
    assert (q_weight is None) == (k_weight is None)
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, head_dim)
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k = torch.empty(tokens, num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens > 0:
        _qk_norm_rope_store_kernel[(tokens, triton.cdiv(heads.shape[1], HEADS_PER_PROGRAM))](
            qkv,
            q_weight,
            k_weight,
            cos_sin,
            positions,
            slot_mapping,
            q,
            k,
            k_cache,
            v_cache,
            eps,
            H=num_heads,
            KV=num_kv_heads,
            D=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            ROWS=HEADS_PER_PROGRAM,
            NORM=q_weight is not None,
            num_warps=4,
            **pdl_options(qkv),
        )
    return q, k, heads[:, num_heads + num_kv_heads :]
