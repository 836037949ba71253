"""How close steps come to the device's limits: bytes that a decode step must read, operations that a prefill must do.

A decode step reads all weights once (of an untied embedding table only the rows of its tokens) and the keys and values
of every sequence it decodes. A prefill multiplies every token with every matrix, the sampled ones with the LM head as
well, and attends to the tokens before; but what the last layer gives for tokens that are not sampled, nobody needs
(decision 065). All of it is the least that could be done; time is from result to result, so scheduling counts against
us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.bench_steps import Phase
from nanoinfer.models.config import DTYPE_BYTES, ModelConfig

if TYPE_CHECKING:
    from nanoinfer.engine.info import DeviceLimits


@dataclass(frozen=True)
class StepCost:
    """Facts of a model on one rank, from its shapes alone."""

    weight_bytes: int  # that a decode step reads
    kv_bytes_per_token: int
    layer_parameters: int  # multiplied with every token
    behind_attention: int  # of them those of the last layer behind its attention, which only sampled tokens need
    head_parameters: int  # multiplied with every sampled token
    flops_per_pair: int  # of attention in one layer: a multiplication and an addition for QK and for PV, in all heads
    num_layers: int

    @classmethod
    def of(cls, model: ModelConfig, dtype: str, tp: int = 1) -> StepCost:
        width = DTYPE_BYTES[dtype]
        head = -(-model.vocab_size // tp) * model.hidden_size
        layers = model.num_parameters(tp) - head * (1 if model.tie_word_embeddings else 2)
        queries, inner = model.num_heads * model.head_dim // tp, -(-model.intermediate_size // tp)
        return cls(
            weight_bytes=(layers + head) * width,
            kv_bytes_per_token=model.kv_bytes_per_token(width, tp),
            layer_parameters=layers,
            behind_attention=model.hidden_size * (queries + 3 * inner),
            head_parameters=head,
            flops_per_pair=4 * queries,
            num_layers=model.num_layers,
        )

    def bytes_read(self, phase: Phase) -> int:
        """By the decode steps of `phase`, over all of them."""
        return phase.steps * self.weight_bytes + phase.decode_context * self.kv_bytes_per_token

    def flops(self, phase: Phase) -> int:
        """Of all tokens of `phase`, prefilled and decoded; in the last layer only those that sampled tokens need."""
        tokens = phase.prefill_tokens + phase.decode_tokens
        matrices = tokens * self.layer_parameters + phase.sampled_tokens * self.head_parameters
        matrices -= (tokens - phase.sampled_tokens) * self.behind_attention
        pairs = (self.num_layers - 1) * phase.prefill_pairs + self.num_layers * phase.decode_context
        return 2 * matrices + self.flops_per_pair * pairs


def achieved(cost: StepCost, phases: dict[str, Phase]) -> dict[str, Any]:
    """Bytes per second of the steps that only decode, operations per second of those that prefill (or do both)."""
    result: dict[str, Any] = {}
    decode = phases.get("decode")
    if decode is not None and decode.seconds > 0:
        read = cost.bytes_read(decode)
        result["decode"] = {"bytes_per_step": read / decode.steps, "bytes_per_s": read / decode.seconds}
    prefills = [phases[kind] for kind in ("prefill", "mixed") if kind in phases]
    seconds = sum(phase.seconds for phase in prefills)
    if seconds > 0:
        flops = sum(cost.flops(phase) for phase in prefills)
        tokens = sum(phase.prefill_tokens for phase in prefills)
        result["prefill"] = {"flops_per_prefill_token": flops / max(tokens, 1), "flops_per_s": flops / seconds}
    return result


def with_limits(roofline: dict[str, Any], limits: DeviceLimits) -> dict[str, Any]:
    """What was achieved, with its fraction of what the device was measured to do."""
    result = {name: dict(figures) for name, figures in roofline.items()}
    if "decode" in result:
        result["decode"]["fraction_of_copy"] = result["decode"]["bytes_per_s"] / limits.copy_bytes_per_s
    if "prefill" in result:
        result["prefill"]["fraction_of_product"] = result["prefill"]["flops_per_s"] / limits.flops_per_s
    return result
