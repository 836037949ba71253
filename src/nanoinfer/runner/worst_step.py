"""Measures the memory of the worst step on a GPU, which decides how much the KV pool may have."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.attention.base import AttentionBackend, AttentionBatch
from nanoinfer.kernels.heads import KVCache
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner import memory
from nanoinfer.runner.graphed_steps import MIXED_TOKENS

# Activations of CUDA graphs, which share one pool, and what libraries allocate when they first see a shape; bytes.
GRAPH_RESERVE = 256 << 20
# Of each logit in graphs: the float32 buffer for their outputs, and the largest graph's own in bfloat16 and float32.
GRAPH_LOGIT_BYTES = 4 + 2 + 4


@dataclass(frozen=True)
class MemoryMark:
    """Free bytes on the device and torch's reserved bytes at one moment, to tell later what this process took.

    Zeros on a CPU.
    """

    free: int
    reserved: int

    @classmethod
    def now(cls, device: torch.device) -> MemoryMark:
        if device.type != "cuda":
            return cls(0, 0)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(free, torch.cuda.memory_reserved(device))


@torch.inference_mode()
def run_worst_step(
    model: Decoder,
    attention: AttentionBackend,
    kv_caches: list[KVCache],
    *,
    num_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    device: torch.device,
) -> None:
    """A prefill of `num_tokens` tokens that stores nothing, then the sampler's largest input, max_num_seqs x V."""
    # The load has a peak of its own, which is over.
    torch.cuda.reset_peak_memory_stats(device)
    lengths = [max_model_len] * (num_tokens // max_model_len)
    if num_tokens % max_model_len:
        lengths.append(num_tokens % max_model_len)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    block_size = kv_caches[0][0].shape[1]
    batch = AttentionBatch(
        positions=torch.cat([torch.arange(n) for n in lengths]).to(device),
        slot_mapping=torch.full_like(tokens, -1),
        cu_seqlens_q=ends.to(torch.int32).to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lengths), -(-max(lengths) // block_size), dtype=torch.int32, device=device),
        starts=[0] * len(lengths),
        query_lens=lengths,
        num_decodes=0,
    )
    last = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
    logits = model.logits(model.forward(tokens, attention.plan(batch), kv_caches, last))
    # The most that the sampler holds beside the logits: a sorted copy, its indices, and the sums over it.
    scratch = (logits.clone(), logits.to(torch.int64), logits.softmax(-1))
    del logits, scratch
    torch.cuda.synchronize(device)


def graph_reserve(config: ModelConfig, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Bytes that CUDA graphs may take after the profiling run: they share a pool, so the largest of them counts."""
    tokens = min(MIXED_TOKENS[-1], max_num_batched_tokens)
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    # At the widest point of a layer, in two bytes: the residual and the normed tokens, and gate, up and their product,
    # or the projections and attention's output.
    widest = 2 * (3 * config.hidden_size + max(3 * config.intermediate_size, heads * config.head_dim))
    return GRAPH_RESERVE + tokens * widest + max_num_seqs * config.vocab_size * GRAPH_LOGIT_BYTES


def measured_kv_budget(start: MemoryMark, utilization: float, reserve: int, device: torch.device) -> int:
    """Bytes for the KV pool after `run_worst_step`; `start` was taken before anything was loaded.

    `reserve` is left for what is allocated later.
    """
    stats = torch.cuda.memory_stats(device)
    peak, current = stats["allocated_bytes.all.peak"], stats["allocated_bytes.all.current"]
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    # What left the device since `start` and is not torch's is ours outside torch: the context's growth and libraries.
    non_torch = max(0, start.free - free - (torch.cuda.memory_reserved(device) - start.reserved))
    return memory.gpu_kv_budget(
        total=total,
        utilization=utilization,
        free_now=free,
        current=current,
        peak=peak,
        non_torch=non_torch,
        graph_reserve=reserve,
    )
