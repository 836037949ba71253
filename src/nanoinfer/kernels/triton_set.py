"""TritonKernels: the kernel set of CUDA. Few tokens go through fused weight-streaming kernels, many to cuBLAS."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels import activation, embed, gemv, keep_bounds, norm, rope, sampling, skinny_matmul
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import KernelSet


class TritonKernels(KernelSet):
    """Norm before and residual after a product are part of it for few tokens; cuBLAS adds the residual itself."""

    name = "triton"
    reads_device_only = True

    def embed_part(self, token_ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
        return embed.embed_part(token_ids, weight, first_id)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _few(x, weight, bias=bias) if _is_few(x, weight) else F.linear(x, weight, bias)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if _is_few(x, weight):
            return _few(x, weight, bias=bias, residual=residual)
        # Out of place, addmm would first copy the residual: one more kernel per product.
        return (residual if bias is None else residual + bias).addmm_(x, weight.t())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _is_few(x, weight):
            return _few(x, weight, norm_weight=norm_weight, eps=eps, bias=bias)
        return super().norm_linear(x, norm_weight, eps, weight, bias)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _is_few(x, weight) and bias is None:
            return _few(x, weight, norm_weight=norm_weight, eps=eps, swiglu=True)
        return super().norm_swiglu(x, norm_weight, eps, weight, bias)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return activation.silu_mul(gate_up)

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


def _is_few(x: Tensor, weight: Tensor) -> bool:
    return len(x) == 1 or (len(x) > 1 and skinny_matmul.pays(len(x), weight))


def _few(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    product = gemv.gemv if len(x) == 1 else skinny_matmul.skinny_matmul
    return product(x, weight, norm_weight=norm_weight, eps=eps, bias=bias, residual=residual, swiglu=swiglu)
