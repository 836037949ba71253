"""The decoder-only transformer that all supported families share; ModelConfig switches what differs.

Qwen3 has QK norm, Qwen2 and 2.5 have QKV biases, Llama 3.x stretches rope; SmolLM2 is a Llama with tied embeddings,
Mistral one without.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionPlan
from nanoinfer.kernels.heads import NO_QK_NORM, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.kernels.layer_products import LayerProducts
from nanoinfer.layers.embedding import Embedding, LMHead
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.partition import Span
from nanoinfer.models.weights import WeightSlot


class DecoderLayer:
    """Pre-norm block: h += o(attention(qkv(norm(h)))), then h += down(swiglu(gate_up(norm(h)))).

    Projections that read the same input are one matrix. QK norm is Qwen3's, the QKV bias Qwen2's. Of heads and inner
    features every rank has a part, so the two sums over ranks are those of o and down.
    """

    def __init__(
        self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device, group: Group
    ) -> None:
        self._kernels, self._group = kernels, group
        partition, head_dim = group.partition, config.head_dim
        hidden, inner = Span.whole(config.hidden_size), partition.features(config.intermediate_size)
        q, kv = partition.query_heads(config).times(head_dim), partition.kv_heads(config).times(head_dim)

        def linear(inputs: Span, outputs: dict[str, Span], bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, kernels=kernels, dtype=dtype, device=device, group=group)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

        self.input_layernorm = norm(config.hidden_size)
        self.qkv_proj = linear(hidden, {"q_proj": q, "k_proj": kv, "v_proj": kv}, config.qkv_bias)
        self._repeated = _repeated_columns(config, group, device)
        self._head_norms = {name: norm(head_dim) for name in ("q_norm", "k_norm") if config.qk_norm}
        self.o_proj = linear(q, {"o_proj": hidden}, config.o_bias)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.gate_up_proj = linear(hidden, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias)
        self.down_proj = linear(inner, {"down_proj": hidden}, config.mlp_bias)
        self.qk_norm = NO_QK_NORM
        if config.qk_norm:
            q_norm, k_norm = self._head_norms.values()
            self.qk_norm = QKNorm(q_norm.weight, k_norm.weight, config.rms_norm_eps)

    def qkv(self, hidden: Tensor) -> Tensor:
        """What attention starts from: [T, H] -> [T, (heads + 2 kv_heads) * D]."""
        qkv = self.qkv_proj.after_norm(hidden, self.input_layernorm)
        return qkv if self._repeated is None else qkv[:, self._repeated]

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """What comes after attention: hidden [T, H], attended [T, heads * D] -> hidden [T, H]."""
        hidden = self.o_proj.add_to(hidden, attended)
        inner = self.gate_up_proj.swiglu_after_norm(hidden, self.post_attention_layernorm)
        return self.down_proj.add_to(hidden, inner)

    def finish_and_start(
        self, hidden: Tensor, attended: Tensor, following: DecoderLayer, products: LayerProducts | None
    ) -> tuple[Tensor, Tensor]:
        """hidden of this layer, qkv of the following one; products: those until there."""
        if products is not None:
            at_once = self._kernels.between_attentions(attended, hidden, products)
            if at_once is not None:
                return at_once
        hidden = self.finish(hidden, attended)
        return hidden, following.qkv(hidden)

    def products_until(self, following: DecoderLayer) -> LayerProducts | None:
        """None where they are more than products: with sums over ranks, or biases after attention."""
        after_attention = (self.o_proj, self.gate_up_proj, self.down_proj)
        if self._group.size > 1 or any(linear.bias is not None for linear in after_attention):
            return None
        return LayerProducts(
            self.o_proj.weight,
            self.post_attention_layernorm.weight,
            self.gate_up_proj.weight,
            self.down_proj.weight,
            following.input_layernorm.weight,
            following.qkv_proj.weight,
            following.qkv_proj.bias,
            self.input_layernorm.eps,
        )

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {
            **self.input_layernorm.weight_slots(f"{prefix}.input_layernorm"),
            **self.qkv_proj.weight_slots(f"{prefix}.self_attn"),
            **self.o_proj.weight_slots(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_slots(f"{prefix}.post_attention_layernorm"),
            **self.gate_up_proj.weight_slots(f"{prefix}.mlp"),
            **self.down_proj.weight_slots(f"{prefix}.mlp"),
        }
        for name, norm in self._head_norms.items():
            slots.update(norm.weight_slots(f"{prefix}.self_attn.{name}"))
        return slots


def _repeated_columns(config: ModelConfig, group: Group, device: torch.device) -> Tensor | None:
    """int64: which column of this rank's q, k and v each column that attention sees is; None where they are equal."""
    partition, head_dim = group.partition, config.head_dim
    num_queries, num_kv, copies = (
        len(partition.query_heads(config)), len(partition.kv_heads(config)), partition.kv_copies(config),
    )  # fmt: skip
    if copies == list(range(num_kv)):
        return None
    heads = [*range(num_queries), *(num_queries + i for i in copies), *(num_queries + num_kv + i for i in copies)]
    starts = torch.tensor(heads, device=device)[:, None] * head_dim
    return (starts + torch.arange(head_dim, device=device)).flatten()


class Decoder:
    """Embedding, layers, final norm and LM head. Parameters are plain tensors: nothing here is trained.

    Weights hold nothing until `weight_slots` are filled. `group` decides which part of the model this rank has;
    `forward`, `logits` and `sample` give the same on every rank.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self.config = config
        self.kernels = kernels
        self.group = group
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, kernels=kernels, dtype=dtype, device=device, group=group
        )
        self.layers = [DecoderLayer(config, kernels, dtype, device, group) for _ in range(config.num_layers)]
        self._products = [layer.products_until(following) for layer, following in pairwise(self.layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        head_weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            head_weight = torch.empty_like(head_weight)
        self.lm_head = LMHead(head_weight, config.vocab_size, kernels=kernels, group=group)

    def forward(
        self, input_ids: Tensor, attention: AttentionPlan, kv_caches: Sequence[KVCache], sample_at: Tensor | None
    ) -> Tensor:
        """The residual stream of the tokens whose successor is sampled, ready for `logits` or `sample`.

        input_ids int64 [T]; sample_at int64 [S], indices into the T tokens of the last one of as many sequences, None
        for all tokens -> [S, H].
        """
        hidden = self.embed_tokens.forward(input_ids)
        last = self.layers[-1]
        qkv = self.layers[0].qkv(hidden)
        steps = zip(pairwise(self.layers), self._products, kv_caches[:-1], strict=True)
        for (layer, following), products, cache in steps:
            attended = attention.run(qkv, layer.qk_norm, cache, None)
            hidden, qkv = layer.finish_and_start(hidden, attended, following, products)
        # What the last layer gives for other tokens, nobody reads: of a long prompt a layer's work, less a QKV product.
        attended = attention.run(qkv, last.qk_norm, kv_caches[-1], sample_at)
        if sample_at is None:
            return last.finish(hidden, attended)
        return last.finish(hidden[sample_at], attended) if len(sample_at) else hidden[sample_at]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> float32 [S, V]."""
        return self.lm_head.after_norm(hidden, self.norm)

    def sample(self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor) -> Tensor:
        """[S, H] -> token ids int64 [S], drawn by nothing but temperature; see `KernelSet.head_best`."""
        return self.lm_head.sample_after_norm(hidden, self.norm, temperatures, seeds, token_indices)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Hugging Face tensor name -> where that tensor goes."""
        slots = self.embed_tokens.weight_slots("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            slots.update(layer.weight_slots(f"model.layers.{i}"))
        slots.update(self.norm.weight_slots("model.norm"))
        if not self.config.tie_word_embeddings:
            slots.update(self.lm_head.weight_slots("lm_head"))
        return slots
