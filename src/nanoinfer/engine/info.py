"""EngineInfo: what the machine and the model decided, once, when the engine started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """A device and what it was measured to be able to do: the ceilings that a step can be held against."""

    name: str
    memory_bytes: int
    threads: int | None  # of a CPU, as torch uses them
    copy_bytes_per_s: float  # of a large copy, bytes read and bytes written counted
    flops_per_s: float  # of a large matrix product


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """Facts of a running engine. Bytes are per rank; `max_model_len` is in tokens, prompt and answer together."""

    model: str
    model_reason: str  # one line: which model was chosen and why
    architecture: str
    device: str
    dtype: str
    attention: str
    attention_reason: str
    kernels: str
    tensor_parallel_size: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    vocab_size: int
    max_model_len: int  # what one sequence can have: the model's limit, lowered to what the pool holds
    max_num_seqs: int
    max_num_batched_tokens: int
    schedule: str
    enable_prefix_caching: bool
    warnings: tuple[str, ...] = ()
