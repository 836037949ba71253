"""Top-k, top-p and min-p without a sort: bisection for the smallest logit that is kept.

Logits map to integers in the same order, so that a bisection ends after as many steps as a logit has bits, and mostly
far earlier, when the interval holds a single logit. Each step reads the row once, from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoinfer.kernels.common import enter, pdl_options, wait_for_inputs

BLOCK = 8192
NUM_WARPS = 16


@triton.jit
def _order_key(logits, SHIFT: tl.constexpr):
    """float32 -> int32 with the same order. bfloat16 values need 16 bits of it (SHIFT = 16)."""
    bits = logits.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _from_key(key, SHIFT: tl.constexpr):
    bits = key << SHIFT
    if SHIFT > 0:
        bits = tl.where(key < 0, bits | ((1 << SHIFT) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load(row_ptr, start, V, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + column, mask=column < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _at_least(row_ptr, key, top, inverse_temperature, V, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """How many logits have at least this key (above that of -inf), and the sum of their weights.

    Compared as floats, which takes fewer instructions than mapping every logit to its key.
    """
    bound = _from_key(key, SHIFT)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        logits = _load(row_ptr, start, V, BLOCK)
        count += (logits >= bound).to(tl.int32)
        mass += tl.where(logits >= bound, tl.exp((logits - top) * inverse_temperature), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _keep_bounds_kernel(
    logits_ptr,  # [B, V]
    temperatures_ptr,  # [B]
    top_k_ptr,  # [B]
    top_p_ptr,  # [B]
    min_p_ptr,  # [B]
    thresholds_ptr,  # [B]
    cutoffs_ptr,  # [B]
    row_stride,
    V,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top_k = tl.load(top_k_ptr + row).to(tl.int32)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    inverse_temperature = 1.0 / temperature
    by_k = (top_k > 0) & (top_k < V)
    by_p = top_p < 1.0
    threshold = float("-inf")
    cutoff = V
    if by_k | by_p | (min_p > 0.0):
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        smallest = tl.full([BLOCK], float("inf"), tl.float32)
        for start in range(0, V, BLOCK):
            logits = _load(row_ptr, start, V, BLOCK)
            largest = tl.maximum(largest, logits)
            inside = start + tl.arange(0, BLOCK) < V
            smallest = tl.minimum(smallest, tl.where(inside, logits, float("inf")))
        top = tl.max(largest, axis=0)
        top_key = _order_key(top, SHIFT)
        bottom_key = _order_key(tl.min(smallest, axis=0), SHIFT)

        # Kept are the logits above key `low` and `ties` of those at it, lowest id first. Throughout, at least the
        # wanted number (or mass) lies at or above `low`, and less than it at or above `high`.
        low = bottom_key.to(tl.int64)
        high = top_key.to(tl.int64) + 1
        count_low = V
        count_high = 0
        ties = V
        if by_k:
            while (high - low > 1) & (count_low != top_k):
                middle = (low + high) >> 1
                count, _ = _at_least(row_ptr, middle.to(tl.int32), top, inverse_temperature, V, BLOCK, SHIFT)
                if count >= top_k:
                    low = middle
                    count_low = count
                else:
                    high = middle
                    count_high = count
            ties = tl.where(count_low == top_k, V, top_k - count_high)
        if by_p:
            high = top_key.to(tl.int64) + 1
            count_high = 0
            mass_high = 0.0
            _, mass_low = _at_least(row_ptr, low.to(tl.int32), top, inverse_temperature, V, BLOCK, SHIFT)
            if by_k & (ties < V):  # the ties that top-k dropped are no part of the whole
                low_weight = tl.exp((_from_key(low.to(tl.int32), SHIFT) - top) * inverse_temperature)
                mass_low -= low_weight * (count_low - top_k)
                count_low = top_k
            wanted = tl.maximum(top_p * mass_low, 1e-30)
            middle = (low + high) >> 1
            if not by_k:  # all logits below this one together weigh less than 1 - p of the largest one alone
                never = top - temperature * tl.log(V / tl.maximum(1.0 - top_p, 1e-7))
                middle = tl.minimum(tl.maximum(_order_key(never, SHIFT).to(tl.int64), low + 1), high - 1)
            while (high - low > 1) & (count_low - count_high > 1):
                count, mass = _at_least(row_ptr, middle.to(tl.int32), top, inverse_temperature, V, BLOCK, SHIFT)
                if mass >= wanted:
                    low = middle
                    count_low = count
                    ties = V
                else:
                    high = middle
                    count_high = count
                    mass_high = mass
                middle = (low + high) >> 1
            if high - low == 1:
                low_weight = tl.exp((_from_key(low.to(tl.int32), SHIFT) - top) * inverse_temperature)
                crossing = tl.ceil((wanted - mass_high) / low_weight)
                ties = tl.minimum(ties, tl.maximum(tl.minimum(crossing, count_low - count_high), 1.0).to(tl.int32))
        key = low.to(tl.int32)
        if min_p > 0.0:
            least = top + temperature * tl.log(min_p)
            min_key = tl.minimum(_order_key(least, SHIFT), top_key)
            if _from_key(min_key, SHIFT) < least:
                min_key = tl.minimum(min_key + 1, top_key)
            if min_key > key:
                key = min_key
                ties = V
        threshold = _from_key(key, SHIFT)
        if ties < V:
            cutoff = -1
            before = 0
            for start in range(0, V, BLOCK):
                logits = _load(row_ptr, start, V, BLOCK)
                column = start + tl.arange(0, BLOCK)
                tie = ((logits == threshold) & (column < V)).to(tl.int32)
                rank = before + tl.cumsum(tie, axis=0)
                cutoff = tl.maximum(cutoff, tl.max(tl.where((tie > 0) & (rank <= ties), column, -1), axis=0))
                before += tl.sum(tie, axis=0)
    tl.store(thresholds_ptr + row, threshold)
    tl.store(cutoffs_ptr + row, cutoff)


def keep_bounds(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """What top-k, then top-p, then min-p keep of logits [B, V]: (threshold float32 [B], cutoff int32 [B]).

    Kept are the logits above the threshold, and those equal to it with an id up to the cutoff. The rest of the
    arguments are [B]: top_k int, 0 is off; top_p keeps the crossing token; min_p 0 is off. Rows without any cost
    nothing.
    """
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    thresholds = torch.empty(batch, dtype=torch.float32, device=logits.device)
    cutoffs = torch.empty(batch, dtype=torch.int32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab_size))
    _keep_bounds_kernel[(batch,)](
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        thresholds,
        cutoffs,
        logits.stride(0),
        vocab_size,
        BLOCK=block,
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
        num_warps=max(1, min(NUM_WARPS, block // 256)),
        **pdl_options(logits),
    )
    return thresholds, cutoffs
