"""The plain torch form of every kernel: the definition that fast kernels are tested against, and the eager fallback.

Shapes: T tokens of all sequences of a step laid end to end, B sequences, H hidden size, D head dimension, V vocabulary,
I intermediate size. A KV cache of one layer is two tensors [num_blocks, block_size, num_kv_heads, D]; a slot is
block_id * block_size + offset. Reductions and rotations are computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nanoinfer.kernels.rows import DecodeInputs, RowState

# ---- a step's inputs -------------------------------------------------------------------------------------------------


def decode_inputs(rows: Tensor, positions: Tensor, state: RowState, block_size: int) -> DecodeInputs:
    """One token each for the sequences in `rows` int64 [B], at `positions` int64 [B]; -1 is padding in any row.

    Then moves the positions on by one, in place, for the step that follows.
    """
    tables, known = state.block_tables[rows], positions.clamp(min=0)
    blocks = tables.gather(1, (known // block_size)[:, None]).squeeze(1).to(torch.int64)
    inputs = DecodeInputs(
        token_ids=state.last_tokens[rows],
        positions=known,
        slot_mapping=torch.where(positions < 0, -1, blocks * block_size + known % block_size),
        context_lens=(positions + 1).to(torch.int32),
        block_tables=tables,
        token_indices=positions + 1 - state.prompt_lens[rows],
        seeds=state.seeds[rows],
        temperatures=state.temperatures[rows],
    )
    positions += (positions >= 0).to(torch.int64)
    return inputs


# ---- normalisation and activation ------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467). x [..., H], weight [H] -> [..., H]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def sum_rms_norm(parts: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """parts [P, T, H] and residual [T, H] summed, and the RMS norm of that: (normed, sum), both like the residual.

    The norm sees the rounded sum, so that the fused and the separate form agree bit for bit.
    """
    total = (parts.float().sum(0) + residual.float()).to(residual.dtype)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's elementwise part (arXiv:2002.05202): [T, 2I], gate first, -> silu(gate) * up, [T, I]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


# ---- rotary embedding and the KV cache -------------------------------------------------------------------------------


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotary(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding (arXiv:2104.09864) in half-split form: element i pairs with element i + D/2.

    q [T, heads, D], k [T, kv_heads, D]; cos_sin float32 [max_position, D], D/2 cosines then D/2 sines; positions [T].
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, kv_heads, D] to their slots (int64 [T]); a slot of -1 writes nothing."""
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    k_cache.view(-1, *k.shape[1:])[slots] = k[written]
    v_cache.view(-1, *v.shape[1:])[slots] = v[written]


def qk_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split qkv [T, (heads + 2 kv_heads) * D], norm q and k per head if weights [D] are given, and rotate them.

    Returns q [T, heads, D], k and v [T, kv_heads, D].
    """
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    return *rotary(q, k, cos_sin, positions), v


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
    """`qk_norm_rope`, and k and v written to their slots."""
    q, k, v = qk_norm_rope(qkv, q_weight, k_weight, eps, cos_sin, positions, num_heads, num_kv_heads, head_dim)
    store_kv(k, v, k_cache, v_cache, slot_mapping)
    return q, k, v


# ---- attention -------------------------------------------------------------------------------------------------------


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One sequence: q [Tq, heads, D] are the last Tq of the Tk positions in k and v [Tk, kv_heads, D] -> like q.

    Query head h reads KV head h // (heads / kv_heads) (grouped-query attention, arXiv:2305.13245).
    """
    num_queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    grouped = q.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,lkd->kgql", grouped, k.float()) * scale
    position = torch.arange(length - num_queries, length, device=q.device)
    future = torch.arange(length, device=q.device)[None, :] > position[:, None]
    probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    return torch.einsum("kgql,lkd->qkgd", probabilities, v.float()).reshape(q.shape).to(q.dtype)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """Causal attention of sequences without history, straight from this step's q, k, v [T, heads, D].

    Sequence i owns tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1; cu_seqlens int [B + 1]. For tests: the twin of
    `prefill_attention.prefill_attention`.
    """
    out = torch.zeros_like(q)
    bounds = cu_seqlens.tolist()
    for start, stop in pairwise(bounds):
        out[start:stop] = causal_attention(q[start:stop], k[start:stop], v[start:stop], scale)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    scale: float,
) -> Tensor:
    """Causal attention through the block table, for decode (one query per sequence) and prefill chunks alike.

    q [T, heads, D]; block_tables int [B, max_blocks]; cu_seqlens_q int [B + 1]; context_lens int [B] counts history
    and this step's tokens, whose k and v are in the cache already. A row of length 0 (padding) gives zeros.
    """
    out = torch.zeros_like(q)
    block_size = k_cache.shape[1]
    bounds, lengths = cu_seqlens_q.tolist(), context_lens.tolist()
    for i, length in enumerate(lengths):
        start, stop = bounds[i], bounds[i + 1]
        if length == 0 or start == stop:
            continue
        blocks = block_tables[i, : -(-length // block_size)].long()
        k = k_cache[blocks].flatten(0, 1)[:length]
        v = v_cache[blocks].flatten(0, 1)[:length]
        out[start:stop] = causal_attention(q[start:stop], k, v, scale)
    return out


# ---- sampling --------------------------------------------------------------------------------------------------------


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    width = 64 if x.dtype == torch.int64 else 32
    return (x >> bits) & ((1 << (width - bits)) - 1)


def _mix64(x: Tensor) -> Tensor:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014), a bijection that scatters the bits of an int64."""
    x = x + (0x9E3779B97F4A7C15 - (1 << 64))
    x = (x ^ _logical_shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _logical_shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _logical_shift(x, 31)


def exponential_noise(seeds: Tensor, token_indices: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise as a pure function of (seed, index of the output token, token id): float32, from 1e-10 to 32.

    seeds and token_indices int64 [B]; token_ids int [V] or [B, V] -> [B, V]. Counter-based, so a row's noise depends
    on no other row, on no earlier step, and not on how the vocabulary is cut across devices. The halves of a 64-bit
    key enter a two-round multiply-xorshift hash (the finaliser of MurmurHash3); all integer arithmetic wraps.
    """
    key = _mix64(_mix64(seeds) + token_indices)[:, None]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    x = token_ids.to(torch.int32) * (0x9E3779B1 - (1 << 32)) + low
    x = (x ^ _logical_shift(x, 16)) * (0x85EBCA6B - (1 << 32))
    x = (x ^ _logical_shift(x, 13) ^ high) * (0xC2B2AE35 - (1 << 32))
    x = x ^ _logical_shift(x, 16)
    # 31 bits, of which float32 keeps the small values exactly: small noise decides the race, so it must not be coarse.
    uniform = (_logical_shift(x, 1).float() + 0.5) * 2.0**-31
    return torch.log1p(-uniform).neg().clamp(min=1e-10, max=32.0)


def best(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor, first_id: int = 0
) -> tuple[Tensor, Tensor]:
    """Draw one token id per row: logits float32 [B, V], the rest [B] -> (int64 [B], its score float32 [B]).

    The score is the logit itself at temperature 0; the first largest wins. Otherwise it is logit / temperature -
    log(noise) with Exp(1) noise, which is largest at token t with probability softmax(logits / temperature)_t (the
    Gumbel-max trick). Nothing in it depends on other tokens, so where the columns are a part of the vocabulary that
    begins with token first_id, the largest score of all parts is that of the whole.
    """
    if logits.device.type == "cpu" and not temperatures.any():  # the noise costs more than all else
        scores, columns = logits.max(dim=-1)
        return columns + first_id, scores
    ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
    greedy = (temperatures == 0)[:, None]
    raced = logits / temperatures[:, None].clamp(min=1e-30)  # below, the quotient would be infinite
    raced = raced - exponential_noise(seeds, token_indices, ids).log()
    scores, columns = torch.where(greedy, logits, raced).max(dim=-1)
    return columns + first_id, scores


def sample(logits: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor) -> Tensor:
    """The token ids of `best`."""
    return best(logits, temperatures, seeds, token_indices)[0]


def apply_penalties(
    logits: Tensor,
    token_ids: Tensor,
    prompt_lens: Tensor,
    lengths: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalise tokens that occurred: logits float32 [B, V], token_ids int64 [B, L], the rest [B] -> [B, V].

    Row i knows token_ids[i, :lengths[i]], of which the first prompt_lens[i] are the prompt. Repetition divides positive
    and multiplies negative logits of tokens in prompt or output (arXiv:1909.05858); presence subtracts once and
    frequency once per occurrence for tokens in the output.
    """
    position = torch.arange(token_ids.shape[1], device=logits.device)[None, :]
    known = (position < lengths[:, None]).float()
    generated = known * (position >= prompt_lens[:, None])
    occurrences = torch.zeros_like(logits).scatter_add_(1, token_ids, known)
    outputs = torch.zeros_like(logits).scatter_add_(1, token_ids, generated)
    factor = torch.where(logits > 0, 1 / repetition[:, None], repetition[:, None])
    logits = torch.where(occurrences > 0, logits * factor, logits)
    return logits - presence[:, None] * (outputs > 0) - frequency[:, None] * outputs


def mask_unlikely(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf the tokens that top-k, then top-p, then min-p exclude: logits float32 [B, V], the rest [B] -> [B, V].

    top_k int, 0 is off. top_p keeps the most likely tokens until their sum, of what top-k left, reaches p, the crossing
    token included (arXiv:1904.09751). min_p drops tokens below min_p times the largest probability (arXiv:2407.01082).
    Equal logits are taken lowest id first. The largest logit always stays. Probabilities are those at the temperature.
    """
    vocab_size = logits.shape[1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab_size, device=logits.device)[None, :]
    limit = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    ordered = ordered.masked_fill(rank >= limit, float("-inf"))
    scale = torch.where(temperatures == 0, 1.0, temperatures)[:, None]
    probabilities = (ordered / scale).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    crossed = (before >= top_p[:, None]) & (top_p[:, None] < 1)  # rounding may carry the sum to 1 before the end
    dropped = crossed | (probabilities < min_p[:, None] * probabilities[:, :1])
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, float("-inf"))
    return torch.empty_like(logits).scatter_(1, order, ordered)


def token_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Natural-log probabilities of the chosen token and of the k most likely ones.

    logits float32 [B, V], token_ids int64 [B] -> (chosen [B], top values [B, k], top ids int64 [B, k]), best first.
    """
    logprobs = logits.log_softmax(dim=-1)
    top_values, top_ids = logprobs.topk(k, dim=-1)
    return logprobs.gather(1, token_ids[:, None]).squeeze(1), top_values, top_ids
