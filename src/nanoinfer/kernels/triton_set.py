"""TritonKernels: the kernel set of CUDA. Few tokens go through fused weight-streaming kernels, many to cuBLAS."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels import (
    activation,
    decode_inputs,
    embed,
    few_tokens_matmul,
    gemv,
    keep_bounds,
    norm,
    persistent_layer,
    products_in_parts,
    rope,
    sampling,
    skinny_matmul,
)
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.kernels.layer_products import LayerProducts
from nanoinfer.kernels.rows import DecodeInputs, RowState


class TritonKernels(KernelSet):
    """For few tokens a product has its norm and residual in it; for many cuBLAS adds the residual itself.

    Between them, for about 200 tokens, the next norm adds it (`products_in_parts`).
    """

    name = "triton"
    reads_device_only = True

    def decode_inputs(self, rows: Tensor, positions: Tensor, state: RowState, block_size: int) -> DecodeInputs:
        return decode_inputs.decode_inputs(rows, positions, state, block_size)

    def embed_part(self, token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
        return embed.embed_part(token_ids, weight, first_id)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product = _fused(x, weight)
        return product(x, weight, bias=bias) if product else F.linear(x, weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if product := _fused(x, weight):
            return product(x, weight, bias=bias, residual=residual)
        # Out of place, addmm would first copy the residual: one more kernel per product.
        return (residual if bias is None else residual + bias).addmm_(x, weight.t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if product := _fused(x, weight):
            return product(x, weight, norm_weight=norm_weight, eps=eps, bias=bias)
        return super().norm_linear(x, norm_weight, eps, weight, bias)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None and (product := _fused(x, weight, swiglu=True)):
            return product(x, weight, norm_weight=norm_weight, eps=eps, swiglu=True)
        return super().norm_swiglu(x, norm_weight, eps, weight, bias)

    def between_attentions(
        self, attended: Tensor, hidden: Tensor, products: LayerProducts
    ) -> tuple[Tensor, Tensor] | None:
        cuts = persistent_layer.chosen_cuts(len(hidden), products)
        if cuts:
            return persistent_layer.persistent_layer(attended, hidden, products, cuts)
        if products_in_parts.pays(hidden, products):
            return products_in_parts.between_attentions(attended, hidden, products)
        return None

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

    def head_logits(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
        return sampling.head_logits(x, weight, norm_weight=norm_weight, eps=eps)

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
        return sampling.head_best(
            x, weight, temperatures, seeds, token_indices, norm_weight=norm_weight, eps=eps, first_id=first_id
        )

    def sample(self, logits: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor) -> Tensor:
        return sampling.best(logits, temperatures, seeds, token_indices)[0]

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
        bounds = keep_bounds.keep_bounds(logits, temperatures, top_k, top_p, min_p)
        return sampling.best(logits, temperatures, seeds, token_indices, bounds)[0]

    def qk_norm_rope_store(
        self, qkv: Tensor, heads: HeadLayout, norm: QKNorm, cos_sin: Tensor, slots: TokenSlots, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        return rope.qk_norm_rope_store(
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


def _fused(x: Tensor, weight: Tensor, *, swiglu: bool = False) -> Callable[..., Tensor] | None:
    """The kernel that multiplies so few tokens and fuses what surrounds the product; None where cuBLAS is faster."""
    tokens = len(x)
    if tokens == 1 and weight.shape[1] <= gemv.MAX_WIDTH:
        return gemv.gemv
    if few_tokens_matmul.pays(tokens, weight, swiglu=swiglu):
        return few_tokens_matmul.few_tokens_matmul
    return skinny_matmul.skinny_matmul if tokens > 1 and skinny_matmul.pays(tokens, weight) else None
