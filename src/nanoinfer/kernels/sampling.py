"""Draw a token from logits: the best score of each part of the vocabulary, then the best of those.

A score is logit / temperature - log(noise) with the counter-based Exp(1) noise of the torch twin (the Gumbel-max
trick), or the logit itself at temperature 0. The largest score wins, the lowest id among equals. Since scores of
different parts of the vocabulary compare directly, neither the maximum nor the sum over the vocabulary is needed.

The noise costs more than reading the logits, so it is computed with the fast logarithm wherever that is exact enough.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from nanoinfer.kernels.common import INTERPRETED, enter, pdl_options, wait_for_inputs
from nanoinfer.kernels.gemv import gemv
from nanoinfer.kernels.norm import rms_norm

PART = 8192  # logits per program
CANDIDATES = 4096  # candidates that the second stage compares at a time
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _mix64(x):
    """The output function of SplitMix64 on uint64."""
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log2(x):
    """Absolute error near 2^-22."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return libdevice.fast_log2f(x)


@triton.jit
def _log_noise(seed, token_index, token_id):
    """Logarithm of the Exp(1) noise of a (seed, index of the output token) pair at the given token ids."""
    key = _mix64(_mix64(seed.to(tl.uint64)) + token_index.to(tl.uint64))
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    x = token_id.to(tl.uint32) * 0x9E3779B1 + low
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ high) * 0xC2B2AE35
    x = x ^ (x >> 16)
    uniform = ((x >> 1).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    # noise = -log(1 - uniform): a series where the fast logarithm would lose the small values that decide the race.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * (0.25 + uniform * 0.2))))
    noise = tl.where(uniform < 0.0625, series, -0.6931471805599453 * _log2(1.0 - uniform))
    return 0.6931471805599453 * _log2(tl.maximum(noise, 1e-10))


@triton.jit
def _score(logits, token_id, temperature, seed, token_index):
    if temperature == 0.0:
        score = logits
    else:
        score = logits * (1.0 / temperature) - _log_noise(seed, token_index, token_id)
    return score


@triton.jit
def _logits_scores_kernel(
    logits_ptr,  # [B, V]
    temperatures_ptr,  # [B]
    seeds_ptr,  # [B]
    token_indices_ptr,  # [B]
    thresholds_ptr,  # [B]
    cutoffs_ptr,  # [B]
    scores_ptr,  # [B, parts]
    ids_ptr,  # [B, parts]
    first_id,
    row_stride,
    V,
    PART: tl.constexpr,
    BOUNDED: tl.constexpr,
    PDL: tl.constexpr,
):
    enter(PDL)
    wait_for_inputs(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    column = part * PART + tl.arange(0, PART)
    logits = tl.load(logits_ptr + row * row_stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
    token_id = first_id + column
    temperature = tl.load(temperatures_ptr + row)
    score = _score(logits, token_id, temperature, tl.load(seeds_ptr + row), tl.load(token_indices_ptr + row))
    kept = column < V
    if BOUNDED:
        threshold = tl.load(thresholds_ptr + row)
        kept = kept & ((logits > threshold) | ((logits == threshold) & (column <= tl.load(cutoffs_ptr + row))))
    kept = kept & (score == score)  # a row of NaN must still name a token that exists
    score = tl.where(kept, score, float("-inf"))
    best, at = tl.max(score, axis=0, return_indices=True)
    place = row * tl.num_programs(0) + part
    tl.store(scores_ptr + place, best)
    tl.store(ids_ptr + place, first_id + part * PART + at)


@triton.jit
def _best_kernel(scores_ptr, ids_ptr, token_ids_ptr, best_scores_ptr, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program per row: the largest of count scores, the lowest id among equals."""
    enter(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for start in range(0, count, BLOCK):
        candidate = start + tl.arange(0, BLOCK)
        score = tl.load(scores_ptr + row * count + candidate, mask=candidate < count, other=float("-inf"))
        token_id = tl.load(ids_ptr + row * count + candidate, mask=candidate < count, other=NO_TOKEN)
        better = (score > best) | ((score == best) & (token_id < best_id))
        best = tl.where(better, score, best)
        best_id = tl.where(better, token_id, best_id)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, best_id, NO_TOKEN), axis=0)
    tl.store(token_ids_ptr + row, winner.to(tl.int64))
    tl.store(best_scores_ptr + row, top)


def _best_of_parts(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """scores and ids [B, parts of the vocabulary] -> the best of each row, as `best` returns them."""
    batch, count = scores.shape
    token_ids = torch.empty(batch, dtype=torch.int64, device=scores.device)
    best_scores = torch.empty(batch, dtype=torch.float32, device=scores.device)
    block = min(CANDIDATES, triton.next_power_of_2(count))
    _best_kernel[(batch,)](
        scores,
        ids,
        token_ids,
        best_scores,
        count,
        BLOCK=block,
        num_warps=max(1, min(16, block // 128)),
        **pdl_options(scores),
    )
    return token_ids, best_scores


def best(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_indices: Tensor,
    bounds: tuple[Tensor, Tensor] | None = None,
    *,
    first_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row: logits [B, V] of any float type -> (ids int64 [B], their scores float32 [B]).

    temperatures float32 [B] (0 takes the first largest logit); seeds and token_indices int64 [B] key the noise. bounds
    are what keep_bounds returned. first_id is the id of the first column (a shard of the vocabulary); scores of
    different shards compare directly.
    """
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1
    parts = triton.cdiv(vocab_size, PART)
    scores = torch.empty(batch, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(batch, parts, dtype=torch.int32, device=logits.device)
    thresholds, cutoffs = bounds if bounds is not None else (None, None)
    _logits_scores_kernel[(parts, batch)](
        logits,
        temperatures,
        seeds,
        token_indices,
        thresholds,
        cutoffs,
        scores,
        ids,
        first_id,
        logits.stride(0),
        vocab_size,
        PART=PART,
        BOUNDED=bounds is not None,
        num_warps=8,
        **pdl_options(logits),
    )
    return _best_of_parts(scores, ids)


def head_logits(hidden: Tensor, weight: Tensor, *, norm_weight: Tensor, eps: float) -> Tensor:
    """The final norm and the LM head's weight [V, K] for hidden [B, K] -> [B, V], in float32 where that is free."""
    if hidden.shape[0] == 1:
        return gemv(hidden, weight, norm_weight=norm_weight, eps=eps, out_dtype=torch.float32)
    return F.linear(rms_norm(hidden, norm_weight, eps), weight)


def head_best(
    hidden: Tensor,
    weight: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    token_indices: Tensor,
    *,
    norm_weight: Tensor,
    eps: float,
    first_id: int = 0,
) -> tuple[Tensor, Tensor]:
    """The final norm, the LM head's weight [V, K] and a draw for hidden [B, K]; arguments and results as in `best`.

    Writing the logits costs less than drawing inside the product, where the noise keeps the weights waiting.
    """
    logits = head_logits(hidden, weight, norm_weight=norm_weight, eps=eps)
    return best(logits, temperatures, seeds, token_indices, first_id=first_id)
