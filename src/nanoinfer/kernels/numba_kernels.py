"""CPU kernels for steps of few tokens, compiled by numba: products with their norm, residual or SwiGLU, and attention.

Shapes and names as in `reference`. All arithmetic is in float32. A bfloat16 array comes as uint16, the upper halves of
the float32 numbers that it stands for, and is widened as it is read. `num_threads` programs share a kernel's work.

All compiled functions stay in this file: numba's cache on disk notices changes of the file that a kernel is in, but
not of what it calls elsewhere. Reductions may be reordered, so that they use vectors; infinities and NaNs are kept.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "cache": True, "nogil": True}
# Rows of a program come in multiples of this: whole cache lines of the output, and whole tiles.
ROWS_TOGETHER = 16

float32, uint16, uint32 = np.float32, np.uint16, np.uint32


# ---- narrow numbers --------------------------------------------------------------------------------------------------


def wide(number):
    """An array's element as float32."""
    raise NotImplementedError  # compiled code only


@overload(wide, inline="always")
def _wide(number):
    if number == types.uint16:
        return lambda number: uint32(uint32(number) << uint32(16)).view(float32)
    return lambda number: number


def narrow(number, like):
    """A float32 as an element of the array `like`, rounded to nearest, ties to even."""
    raise NotImplementedError


@overload(narrow, inline="always")
def _narrow(number, like):
    if like.dtype == types.uint16:

        def rounded(number, like):
            bits = float32(number).view(uint32)
            return uint16((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16))

        return rounded
    return lambda number, like: number


# ---- products --------------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _share(total, program, num_programs, together):
    """First and last (exclusive) of the items of one program, a multiple of `together` of them."""
    each = -(-total // (together * num_programs)) * together
    first = min(total, program * each)
    return first, min(total, first + each)


@njit(**OPTIONS)
def _multiply_one(x, weight, first, last, out):
    """out[n] = weight[n] @ x for n from first to last: bound by reading the matrix, one row after the other."""
    for n in range(first, last):
        total = float32(0)
        for k in range(x.shape[0]):
            total += wide(weight[n, k]) * x[k]
        out[n] = total


@njit(**OPTIONS)
def _widen(row, out):
    for k in range(len(row)):
        out[k] = wide(row[k])


@njit(**OPTIONS)
def _multiply_few(x, weight, first, last, out):
    """out[t, n] = weight[n] @ x[t], four rows by two tokens at a time: the sums and their operands fill the registers.

    The rows stay in the first-level cache for all tokens. Past the last row or token the last one is taken again.
    """
    num_tokens, width = x.shape
    rows = np.empty((4, width), float32)
    for n0 in range(first, last, 4):
        n1, n2, n3 = min(n0 + 1, last - 1), min(n0 + 2, last - 1), min(n0 + 3, last - 1)
        _widen(weight[n0], rows[0])
        _widen(weight[n1], rows[1])
        _widen(weight[n2], rows[2])
        _widen(weight[n3], rows[3])
        for t0 in range(0, num_tokens, 2):
            t1 = min(t0 + 1, num_tokens - 1)
            a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = float32(0)
            for k in range(width):
                x0, x1 = x[t0, k], x[t1, k]
                a, b, c, d = rows[0, k], rows[1, k], rows[2, k], rows[3, k]
                a0 += a * x0
                a1 += a * x1
                b0 += b * x0
                b1 += b * x1
                c0 += c * x0
                c1 += c * x1
                d0 += d * x0
                d1 += d * x1
            out[t0, n0], out[t0, n1], out[t0, n2], out[t0, n3] = a0, b0, c0, d0
            out[t1, n0], out[t1, n1], out[t1, n2], out[t1, n3] = a1, b1, c1, d1


@njit(**OPTIONS)
def _multiply(x, weight, bias, first, last, out):
    """Columns first to last of x @ weight.T + bias; an empty bias is none."""
    if x.shape[0] == 1:
        _multiply_one(x[0], weight, first, last, out[0])
    else:
        _multiply_few(x, weight, first, last, out)
    if len(bias):
        for t in range(x.shape[0]):
            for n in range(first, last):
                out[t, n] += wide(bias[n])


@njit(**OPTIONS)
def _rms_norm(x, weight, eps, out):
    total = float32(0)
    for k in range(len(x)):
        total += x[k] * x[k]
    factor = float32(1) / np.sqrt(total / float32(len(x)) + float32(eps))
    for k in range(len(x)):
        out[k] = x[k] * factor * wide(weight[k])


@njit(**OPTIONS)
def _rms_norm_rows(x, weight, eps):
    normed = np.empty_like(x)
    for t in range(x.shape[0]):
        _rms_norm(x[t], weight, eps, normed[t])
    return normed


@njit(parallel=True, **OPTIONS)
def linear_add(x, weight, bias, residual, out, num_threads):
    """out = residual + x @ weight.T + bias."""
    for program in prange(num_threads):
        first, last = _share(weight.shape[0], program, num_threads, ROWS_TOGETHER)
        _multiply(x, weight, bias, first, last, out)
        for t in range(x.shape[0]):
            for n in range(first, last):
                out[t, n] += residual[t, n]


@njit(parallel=True, **OPTIONS)
def norm_linear(x, norm_weight, eps, weight, bias, out, num_threads):
    """out = rms_norm(x) @ weight.T + bias."""
    normed = _rms_norm_rows(x, norm_weight, eps)
    for program in prange(num_threads):
        first, last = _share(weight.shape[0], program, num_threads, ROWS_TOGETHER)
        _multiply(normed, weight, bias, first, last, out)


@njit(parallel=True, **OPTIONS)
def norm_swiglu(x, norm_weight, eps, weight, bias, gate_up, out, num_threads):
    """out [T, I] = silu(gate) * up of rms_norm(x); weight [2 I, H]; gate_up [T, 2 I] is scratch."""
    normed = _rms_norm_rows(x, norm_weight, eps)
    inner = out.shape[1]
    for program in prange(num_threads):
        first, last = _share(inner, program, num_threads, ROWS_TOGETHER)
        _multiply(normed, weight, bias, first, last, gate_up)
        _multiply(normed, weight, bias, inner + first, inner + last, gate_up)
        for t in range(x.shape[0]):
            for n in range(first, last):
                gate = gate_up[t, n]
                out[t, n] = gate / (float32(1) + math.exp(-gate)) * gate_up[t, inner + n]


# ---- heads -----------------------------------------------------------------------------------------------------------


@njit(**OPTIONS)
def _norm_and_rotate(head, norm_weight, eps, cos_sin, scratch, out):
    """One query or key head [D]: RMS norm if there is a weight, then the rotation by cos_sin [D]; rounded once."""
    half = len(head) // 2
    if len(norm_weight):
        _rms_norm(head, norm_weight, eps, scratch)
    else:
        scratch[:] = head
    for i in range(half):
        first, second, cos, sin = scratch[i], scratch[half + i], cos_sin[i], cos_sin[half + i]
        out[i] = narrow(first * cos - second * sin, out)
        out[half + i] = narrow(second * cos + first * sin, out)


@njit(parallel=True, **OPTIONS)
def qk_norm_rope_store(
    qkv, q_weight, k_weight, eps, cos_sin, positions, k_cache, v_cache, slot_mapping, q, k, v, num_threads
):
    """Fill q, k and v and the slots of the cache from qkv [T, all heads, D]; an empty weight is no norm."""
    num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
    block_size = k_cache.shape[1]
    for program in prange(num_threads):
        first, last = _share(len(positions), program, num_threads, 1)
        scratch = np.empty(head_dim, float32)
        for t in range(first, last):
            turn = cos_sin[positions[t]]
            block, offset = divmod(slot_mapping[t], block_size)
            for h in range(num_heads):
                _norm_and_rotate(qkv[t, h], q_weight, eps, turn, scratch, q[t, h])
            for h in range(num_kv_heads):
                _norm_and_rotate(qkv[t, num_heads + h], k_weight, eps, turn, scratch, k[t, h])
                value = qkv[t, num_heads + num_kv_heads + h]
                for d in range(head_dim):
                    v[t, h, d] = narrow(value[d], v)
                    k_cache[block, offset, h, d] = k[t, h, d]
                    v_cache[block, offset, h, d] = v[t, h, d]


@njit(**OPTIONS)
def _softmax(scores):
    largest = scores[0]
    for i in range(len(scores)):
        largest = max(largest, scores[i])
    total = float32(0)
    for i in range(len(scores)):
        scores[i] = math.exp(scores[i] - largest)
        total += scores[i]
    for i in range(len(scores)):
        scores[i] /= total


@njit(**OPTIONS)
def _cached(cache, blocks, position, kv_head):
    """The key or value [D] of one position of a sequence."""
    block_size = cache.shape[1]
    return cache[blocks[position // block_size], position % block_size, kv_head]


@njit(**OPTIONS)
def _attend(q, k_cache, v_cache, blocks, length, kv_head, scores, out):
    """The query heads of one KV head of one sequence: q [group, D] (scaled) -> out [group, D].

    scores [group, at least length rounded up to 4] is scratch. Four positions are taken at a time; past the last one
    the last one is taken again, with probability 0.
    """
    group, head_dim = q.shape
    for first in range(0, length, 4):
        k0 = _cached(k_cache, blocks, first, kv_head)
        k1 = _cached(k_cache, blocks, min(first + 1, length - 1), kv_head)
        k2 = _cached(k_cache, blocks, min(first + 2, length - 1), kv_head)
        k3 = _cached(k_cache, blocks, min(first + 3, length - 1), kv_head)
        for g in range(group):
            s0 = s1 = s2 = s3 = float32(0)
            for d in range(head_dim):
                s0 += q[g, d] * wide(k0[d])
                s1 += q[g, d] * wide(k1[d])
                s2 += q[g, d] * wide(k2[d])
                s3 += q[g, d] * wide(k3[d])
            scores[g, first], scores[g, first + 1], scores[g, first + 2], scores[g, first + 3] = s0, s1, s2, s3
    for g in range(group):
        _softmax(scores[g, :length])
        scores[g, length:] = float32(0)
    out[:] = float32(0)
    for first in range(0, length, 4):
        v0 = _cached(v_cache, blocks, first, kv_head)
        v1 = _cached(v_cache, blocks, min(first + 1, length - 1), kv_head)
        v2 = _cached(v_cache, blocks, min(first + 2, length - 1), kv_head)
        v3 = _cached(v_cache, blocks, min(first + 3, length - 1), kv_head)
        for g in range(group):
            p0, p1, p2, p3 = scores[g, first], scores[g, first + 1], scores[g, first + 2], scores[g, first + 3]
            for d in range(head_dim):
                out[g, d] += (p0 * wide(v0[d]) + p1 * wide(v1[d])) + (p2 * wide(v2[d]) + p3 * wide(v3[d]))


@njit(parallel=True, **OPTIONS)
def paged_decode(q, k_cache, v_cache, block_tables, context_lens, scale, out, num_threads):
    """Attention of sequences with one query each: q [B, heads, D] -> out float32 [B, heads, D].

    block_tables int32 [B, most blocks], context_lens int32 [B], at least 1. Programs take pairs of a sequence and a
    KV head in turn, so that long and short sequences spread over them.
    """
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    longest = context_lens.max()
    for program in prange(num_threads):
        scaled = np.empty((group, head_dim), float32)
        scores = np.empty((group, longest + 3), float32)
        for item in range(program, num_seqs * num_kv_heads, num_threads):
            i, kv_head = divmod(item, num_kv_heads)
            heads = slice(kv_head * group, (kv_head + 1) * group)
            for g in range(group):
                for d in range(head_dim):
                    scaled[g, d] = wide(q[i, kv_head * group + g, d]) * float32(scale)
            _attend(scaled, k_cache, v_cache, block_tables[i], context_lens[i], kv_head, scores, out[i, heads])
