"""A memory plan as text for a person and as a JSON document."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from nanoinfer.cli.cache_plan import MemoryPlan
from nanoinfer.models.config import ModelConfig
from nanoinfer.ui.text import byte_size, count, plural


def plan_as_text(name: str, model: ModelConfig, plan: MemoryPlan) -> str:
    """The budget of one rank, line by line, and what it holds."""
    split = f", split over {plan.tp} GPUs; all figures are of one" if plan.tp > 1 else ""
    lengths = sorted({n for n in (1024, 4096, 16_384) if n < plan.max_model_len} | {plan.max_model_len})
    return "\n".join(
        [
            f"{name}: {model.num_parameters() / 1e9:.2f} billion parameters in {plan.dtype}{split}",
            "",
            f"  memory                {byte_size(plan.memory):>10}",
            f"  usable                {byte_size(plan.usable):>10}",
            f"  - weights             {byte_size(plan.weights):>10}",
            f"  - activations         {byte_size(plan.activations):>10}   estimate",
            f"  - overhead            {byte_size(plan.overhead):>10}   estimate",
            f"  = KV pool             {byte_size(plan.kv_bytes):>10}   {plural(plan.num_blocks, 'block')} of "
            f"{plural(plan.block_size, 'token')}",
            "",
            f"  KV of one token       {count(plan.kv_bytes_per_token):>10} B",
            f"  tokens that fit       {count(plan.tokens):>10}",
            *(f"  sequences of {count(n):>8} {count(plan.sequences(n)):>10}" for n in lengths),
        ]
    )


def plan_as_document(name: str, model: ModelConfig, plan: MemoryPlan) -> dict[str, Any]:
    derived = {"kv_bytes": plan.kv_bytes, "tokens": plan.tokens, "sequences": plan.sequences(plan.max_model_len)}
    estimates = ["activations", "overhead"]
    return {"model": name, "parameters": model.num_parameters(), **asdict(plan), **derived, "estimates": estimates}
