"""The decoder-only transformer that all supported families share; ModelConfig switches what differs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionPlan, KVCache, QKNorm
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.embedding import Embedding, LMHead
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.weights import WeightSlot


class DecoderLayer:
    """Pre-norm block: h += o(attention(qkv(norm(h)))), then h += down(swiglu(gate_up(norm(h)))).

    Projections that read the same input are one matrix. QK norm is Qwen3's, the QKV bias Qwen2's.
    """

    def __init__(self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def linear(in_features: int, parts: dict[str, int], bias: bool) -> Linear:
            return Linear(in_features, parts, bias=bias, kernels=kernels, dtype=dtype, device=device)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

        self.input_layernorm = norm(hidden)
        self.qkv_proj = linear(hidden, {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, config.qkv_bias)
        self.q_norm = norm(config.head_dim) if config.qk_norm else None
        self.k_norm = norm(config.head_dim) if config.qk_norm else None
        self.o_proj = linear(q_size, {"o_proj": hidden}, config.o_bias)
        self.post_attention_layernorm = norm(hidden)
        self.gate_up_proj = linear(hidden, {"gate_proj": inner, "up_proj": inner}, config.mlp_bias)
        self.down_proj = linear(inner, {"down_proj": hidden}, config.mlp_bias)
        self.qk_norm = None
        if self.q_norm is not None and self.k_norm is not None:
            self.qk_norm = QKNorm(self.q_norm.weight, self.k_norm.weight, config.rms_norm_eps)

    def __call__(self, hidden: Tensor, cache: KVCache, attention: AttentionPlan) -> Tensor:
        """[T, H] -> [T, H]; this step's keys and values go into the cache."""
        qkv = self.qkv_proj.after_norm(hidden, self.input_layernorm)
        hidden = self.o_proj.add_to(hidden, attention.run(qkv, self.qk_norm, cache))
        inner = self.gate_up_proj.swiglu_after_norm(hidden, self.post_attention_layernorm)
        return self.down_proj.add_to(hidden, inner)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {
            **self.input_layernorm.weight_slots(f"{prefix}.input_layernorm"),
            **self.qkv_proj.weight_slots(f"{prefix}.self_attn"),
            **self.o_proj.weight_slots(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_slots(f"{prefix}.post_attention_layernorm"),
            **self.gate_up_proj.weight_slots(f"{prefix}.mlp"),
            **self.down_proj.weight_slots(f"{prefix}.mlp"),
        }
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                slots.update(norm.weight_slots(f"{prefix}.self_attn.{name}"))
        return slots


class Decoder:
    """Embedding, layers, final norm and LM head. Parameters are plain tensors: nothing here is trained.

    Weights hold nothing until `weight_slots` are filled.
    """

    def __init__(self, config: ModelConfig, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.kernels = kernels
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, kernels=kernels, dtype=dtype, device=device
        )
        self.layers = [DecoderLayer(config, kernels, dtype, device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        head_weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            head_weight = torch.empty_like(head_weight)
        self.lm_head = LMHead(head_weight, kernels=kernels)

    def forward(
        self, input_ids: Tensor, attention: AttentionPlan, kv_caches: Sequence[KVCache], sample_at: Tensor | None
    ) -> Tensor:
        """The residual stream of the tokens whose successor is sampled, ready for `logits` or `sample`.

        input_ids int64 [T]; sample_at int64 [S], indices into the T tokens, None for all of them -> [S, H].
        """
        hidden = self.embed_tokens(input_ids)
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            hidden = layer(hidden, cache, attention)
        return hidden if sample_at is None else hidden[sample_at]

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> float32 [S, V]."""
        return self.lm_head.after_norm(hidden, self.norm)

    def sample(self, hidden: Tensor, temperatures: Tensor, seeds: Tensor, token_indices: Tensor) -> Tensor:
        """[S, H] -> token ids int64 [S], drawn by nothing but temperature; see `KernelSet.head_sample`."""
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
