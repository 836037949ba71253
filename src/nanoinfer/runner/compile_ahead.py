"""Compiles the kernels of the first steps side by side: one after the other they would hold up the first token.

A kernel is compiled when it is first launched, and most of that time is spent waiting for the assembler and the C
compiler. So the operations of a layer that a start needs are run once beforehand, each in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from nanoinfer.attention.base import AttentionBackend, AttentionBatch
from nanoinfer.kernels.heads import KVCache
from nanoinfer.kernels.rows import RowState
from nanoinfer.models.decoder import Decoder

# One token, a few and many are computed by different kernels. Those between are compiled when they come up.
FEW_TOKENS, MANY_TOKENS = (1, 3), 512


class KernelCompilation:
    """Operations under way in threads. Their results mean nothing, and the weights they read may not be there yet."""

    def __init__(self, model: Decoder, attention: AttentionBackend, cache: KVCache) -> None:
        """cache: one layer's, of at least one block; nothing is written to it."""
        device = cache[0].device
        jobs = [job for tokens in FEW_TOKENS for job in _layer_operations(model, device, tokens)]
        # One after the other: cuBLAS keeps 32 MiB for every thread that has multiplied.
        jobs.append(partial(_run_all, _layer_operations(model, device, MANY_TOKENS)))
        jobs += [partial(_attend, model, attention, cache, batch) for batch in _batches(device)]
        jobs += [partial(_sample, model, device), partial(_gather_inputs, model, cache)]
        self._pool = ThreadPoolExecutor(len(jobs), thread_name_prefix="compile")
        self._jobs = [self._pool.submit(_run, job, device) for job in jobs]

    def wait(self) -> None:
        """Until all kernels are there. Raises what a kernel raised."""
        self._pool.shutdown()
        for job in self._jobs:
            job.result()


@torch.inference_mode()
def _run(job: Callable[[], object], device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device of its own
    job()


def _run_all(jobs: list[Callable[[], object]]) -> None:
    for job in jobs:
        job()


def _layer_operations(model: Decoder, device: torch.device, tokens: int) -> list[Callable[[], object]]:
    layer = model.layers[0]

    def zeros(width: int) -> torch.Tensor:
        return torch.zeros(tokens, width, dtype=layer.qkv_proj.weight.dtype, device=device)

    hidden, attended, inner = (linear.weight.shape[1] for linear in (layer.qkv_proj, layer.o_proj, layer.down_proj))
    products = layer.products_until(layer)  # those until the next layer have the same shapes
    return [
        lambda: products and model.kernels.between_attentions(zeros(attended), zeros(hidden), products),
        lambda: layer.qkv_proj.after_norm(zeros(hidden), layer.input_layernorm),
        lambda: layer.o_proj.add_to(zeros(hidden), zeros(attended)),
        lambda: layer.gate_up_proj.swiglu_after_norm(zeros(hidden), layer.post_attention_layernorm),
        lambda: layer.down_proj.add_to(zeros(hidden), zeros(inner)),
    ]


def _batches(device: torch.device) -> list[AttentionBatch]:
    """A decode, a prefill without history, and one with."""

    def batch(history: int, queries: int, num_decodes: int) -> AttentionBatch:
        def integers(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return AttentionBatch(
            positions=integers([0] * queries, torch.int64),
            slot_mapping=integers([-1] * queries, torch.int64),
            cu_seqlens_q=integers([0, queries]),
            context_lens=integers([history + queries]),
            block_tables=integers([0]).view(1, 1),
            starts=[history],
            query_lens=[queries],
            num_decodes=num_decodes,
        )

    return [batch(0, 1, 1), batch(0, 8, 0), batch(8, 8, 0)]


def _attend(model: Decoder, attention: AttentionBackend, cache: KVCache, batch: AttentionBatch) -> None:
    layer = model.layers[0]
    weight = layer.qkv_proj.weight
    qkv = torch.zeros(len(batch.positions), weight.shape[0], dtype=weight.dtype, device=weight.device)
    attention.plan(batch).run(qkv, layer.qk_norm, cache)


def _sample(model: Decoder, device: torch.device) -> None:
    weight = model.lm_head.weight
    hidden = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=device)
    temperatures = torch.zeros(1, device=device)
    index = torch.zeros(1, dtype=torch.int64, device=device)
    model.sample(hidden, temperatures, index, index)


def _gather_inputs(model: Decoder, cache: KVCache) -> None:
    device = cache[0].device
    index = torch.zeros(1, dtype=torch.int64, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    state = RowState(index, table, index, index, torch.zeros(1, device=device))
    model.kernels.decode_inputs(index, index, state, cache[0].shape[1])
