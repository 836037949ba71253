"""Embedding rows of a part of the vocabulary, zeros for the rest, in one kernel: the ranks' parts are then added.

It is no dependent launch and lets none start early: the barrier before which a step's inputs are complete (`common`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _embed_part_kernel(
    token_ids_ptr,  # [T]
    weight_ptr,  # [V, H]
    out_ptr,  # [T, H]
    first_id,
    V,
    H,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(token_ids_ptr + token) - first_id
    valid = column < H
    here = (row >= 0) & (row < V)
    values = tl.load(weight_ptr + row.to(tl.int64) * H + column, mask=valid & here, other=0.0)
    tl.store(out_ptr + token * H + column, values, mask=valid)


def embed_part(token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """Rows of weight [V, H], that of token first_id first, by token id: int64 [T] -> [T, H], zeros elsewhere."""
    assert weight.is_contiguous()
    tokens, (vocab, width) = len(token_ids), weight.shape
    out = torch.empty(tokens, width, dtype=weight.dtype, device=weight.device)
    if tokens > 0:
        _embed_part_kernel[(tokens, triton.cdiv(width, BLOCK))](
            token_ids, weight, out, first_id, vocab, width, BLOCK=BLOCK, num_warps=4
        )
    return out
