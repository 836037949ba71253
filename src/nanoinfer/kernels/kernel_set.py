"""KernelSet: the operations that a decoder calls. This is the plain form; a device's set overrides what it fuses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels import reference
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm, TokenSlots
from nanoinfer.kernels.layer_products import LayerProducts
from nanoinfer.kernels.rows import DecodeInputs, RowState


class KernelSet:
    """T tokens; weights are [out, in] as in a checkpoint, biases [out] or None.

    The residual stream is carried through `linear_add`, and a norm always feeds a matrix, so a set can fuse either
    with the multiplication. Meaning and rounding of the elementwise parts are those in `reference`.

    `reads_device_only`: a step's kernels never make the host wait for the device, so it can be a CUDA graph. The plain
    ones do when they skip the slots of padding.
    """

    name = "eager"
    reads_device_only = False

    def decode_inputs(self, rows: Tensor, positions: Tensor, state: RowState, block_size: int) -> DecodeInputs:
        """What a decode of the sequences in rows int64 [B] starts from, at positions int64 [B]; -1 is padding.

        Moves the positions on by one, in place.
        """
        return reference.decode_inputs(rows, positions, state, block_size)

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [V, H] by token id: [T] -> [T, H], in the dtype that the layers compute with."""
        return F.embedding(token_ids, weight)

    def embed_part(self, token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
        """embed with the rows of token first_id and those after it alone: zeros for all other tokens."""
        rows = token_ids - first_id
        elsewhere = (rows < 0) | (rows >= len(weight))
        return self.embed(rows.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [T, in] -> x @ weight.T + bias, [T, out]."""
        return F.linear(x, weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """x [T, in], residual [T, out] -> residual + linear(x); the residual's memory may be overwritten with it."""
        return residual + self.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [T, H], weight [H] -> [T, H]."""
        return reference.rms_norm(x, weight, eps)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(rms_norm(x))."""
        return self.linear(self.rms_norm(x, norm_weight, eps), weight, bias)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """silu(gate) * up of rms_norm(x), with weight [2 I, H] = gate rows, then up rows -> [T, I]."""
        return self.silu_mul(self.norm_linear(x, norm_weight, eps, weight, bias))

    def between_attentions(
        self, attended: Tensor, hidden: Tensor, products: LayerProducts
    ) -> tuple[Tensor, Tensor] | None:
        """attended [T, Q], hidden [T, H] -> hidden and qkv of LayerProducts; None where that is done step by step.

        The memory of the given hidden may be overwritten with the new one.
        """
        return None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]."""
        return reference.silu_mul(gate_up)

    def head_logits(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        """Norm and LM head for x [S, H] -> [S, V], float32 or of the weights' dtype; `head_best` draws from them."""
        return self.norm_linear(x, norm_weight, eps, weight, None)

    def head_best(
        self,
        x: Tensor,
        norm_weight: Tensor,
        eps: float,
        weight: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        token_indices: Tensor,
        first_id: int,
    ) -> tuple[Tensor, Tensor]:
        """Norm, LM head and a draw (or argmax at temperature 0) for x [S, H] -> token ids int64 [S], scores float32.

        weight has the rows of the head from token first_id on: a part of the vocabulary, whose best score then
        compares with those of the other parts. temperatures float32, seeds and token_indices (of the output token that
        is drawn) int64, all [S].
        """
        logits = self.head_logits(x, norm_weight, eps, weight).float()
        return reference.best(logits, temperatures, seeds, token_indices, first_id)

    def sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor) -> Tensor:
        """A draw from float32 logits [S, V] -> token ids int64 [S]; the rest as in `head_best`."""
        return reference.sample(logits, temperatures, seeds, token_indices)

    def filtered_sample(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        token_indices: Tensor,
    ) -> Tensor:
        """A draw from what top-k, then top-p, then min-p leave of float32 logits [S, V] -> token ids int64 [S].

        top_k int64 (0 is off), top_p and min_p float32, the rest as in `head_best`, all [S].
        """
        kept = reference.mask_unlikely(logits, temperatures, top_k, top_p, min_p)
        return self.sample(kept, temperatures, seeds, token_indices)

    def qk_norm_rope_store(
        self, qkv: Tensor, heads: HeadLayout, norm: QKNorm, cos_sin: Tensor, slots: TokenSlots, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [T, (heads + 2 kv_heads) * D] -> q [T, heads, D], k and v [T, kv_heads, D]; k and v go to their slots."""
        return reference.qk_norm_rope_store(
            qkv,
            norm.q_weight,
            norm.k_weight,
            norm.eps,
            cos_sin,
            slots.positions,
            *cache,
            slots.slot_mapping,
            *heads.counts,
        )


EAGER = KernelSet()
