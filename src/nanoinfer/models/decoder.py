"""The decoder-only transformer that all supported families share; ModelConfig switches what differs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nanoinfer.attention.base import AttentionPlan
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.embedding import Embedding, LMHead
from nanoinfer.layers.linear import Linear
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.layers.rotary import rotary_table
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.weights import WeightSlot

KVCache = tuple[Tensor, Tensor]  # keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]


class SelfAttention:
    """Grouped-query attention over the paged cache, with optional QK norm (Qwen3) and biases (Qwen2)."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        self._eps = config.rms_norm_eps
        self._kernels = kernels
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.qkv_bias,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(
            q_size, {"o_proj": config.hidden_size}, bias=config.o_bias, kernels=kernels, dtype=dtype, device=device
        )
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = torch.empty(config.head_dim, dtype=dtype, device=device)
            self.k_norm = torch.empty(config.head_dim, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: KVCache, attention: AttentionPlan
    ) -> Tensor:
        """[T, H] -> [T, H]; writes this step's keys and values to their slots before it attends."""
        q, k, v = self._kernels.qk_norm_rope_store(
            self.qkv_proj(x), self.q_norm, self.k_norm, self._eps, cos_sin, positions, *cache, slots, *self._heads
        )
        return self.o_proj(attention.run(q, k, v, *cache).flatten(1))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        slots = {**self.qkv_proj.weight_slots(prefix), **self.o_proj.weight_slots(prefix)}
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                slots[f"{prefix}.{name}.weight"] = WeightSlot(weight, tuple(weight.shape))
        return slots


class MLP:
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(
            hidden,
            {"gate_proj": inner, "up_proj": inner},
            bias=config.mlp_bias,
            kernels=kernels,
            dtype=dtype,
            device=device,
        )
        self.down_proj = Linear(
            inner, {"down_proj": hidden}, bias=config.mlp_bias, kernels=kernels, dtype=dtype, device=device
        )
        self._silu_mul = kernels.silu_mul

    def __call__(self, x: Tensor) -> Tensor:
        return self.down_proj(self._silu_mul(self.gate_up_proj(x)))

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {**self.gate_up_proj.weight_slots(prefix), **self.down_proj.weight_slots(prefix)}


class DecoderLayer:
    """Pre-norm block. The residual stream travels beside x, so that each addition fuses with the norm after it."""

    def __init__(self, config: ModelConfig, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> None:
        self.input_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, kernels=kernels, dtype=dtype, device=device
        )
        self.self_attn = SelfAttention(config, kernels, dtype, device)
        self.post_attention_layernorm = RMSNorm(
            config.hidden_size, config.rms_norm_eps, kernels=kernels, dtype=dtype, device=device
        )
        self.mlp = MLP(config, kernels, dtype, device)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        return {
            **self.input_layernorm.weight_slots(f"{prefix}.input_layernorm"),
            **self.self_attn.weight_slots(f"{prefix}.self_attn"),
            **self.post_attention_layernorm.weight_slots(f"{prefix}.post_attention_layernorm"),
            **self.mlp.weight_slots(f"{prefix}.mlp"),
        }


class Decoder:
    """Embedding, layers, final norm and LM head. Parameters are plain tensors: nothing here is trained.

    `max_positions` is the longest sequence in use, in tokens. Weights hold nothing until `weight_slots` are filled.
    """

    def __init__(
        self, config: ModelConfig, *, kernels: KernelSet, dtype: torch.dtype, device: torch.device, max_positions: int
    ) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, kernels, dtype, device) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels=kernels, dtype=dtype, device=device)
        head_weight = self.embed_tokens.weight
        if not config.tie_word_embeddings:
            head_weight = torch.empty_like(head_weight)
        self.lm_head = LMHead(head_weight, kernels=kernels)
        self.cos_sin = rotary_table(config.rope, config.head_dim, max_positions, device)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        attention: AttentionPlan,
        kv_caches: Sequence[KVCache],
        last_tokens: Tensor,
    ) -> Tensor:
        """Hidden states of the tokens whose successor is sampled, ready for `logits`.

        input_ids, positions, slot_mapping int64 [T]; last_tokens int64 [S], indices into the T tokens -> [S, H].
        """
        residual = self.embed_tokens(input_ids)
        x = self.layers[0].input_layernorm(residual)
        for i, (layer, cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            if i > 0:
                x, residual = layer.input_layernorm.add(x, residual)
            x = layer.self_attn(x, self.cos_sin, positions, slot_mapping, cache, attention)
            x, residual = layer.post_attention_layernorm.add(x, residual)
            x = layer.mlp(x)
        hidden, _ = self.norm.add(x[last_tokens], residual[last_tokens])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> float32 [S, V]."""
        return self.lm_head(hidden)

    def weight_slots(self) -> dict[str, WeightSlot]:
        """Hugging Face tensor name -> where that tensor goes."""
        slots = self.embed_tokens.weight_slots("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            slots.update(layer.weight_slots(f"model.layers.{i}"))
        slots.update(self.norm.weight_slots("model.norm"))
        if not self.config.tie_word_embeddings:
            slots.update(self.lm_head.weight_slots("lm_head"))
        return slots
