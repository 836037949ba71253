"""ModelRunner: one scheduled batch in, one sampled token per sequence out. Waits for each step: the plain form."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionBatch
from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepResult
from nanoinfer.kernels.heads import KVCache
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.input_batch import SequenceRows, StepArrays
from nanoinfer.runner.sampler import Sampled, Sampler
from nanoinfer.runner.sampling_table import SamplingTable
from nanoinfer.runner.upload import upload


@dataclass(frozen=True)
class StepInput:
    """One step on the device: T tokens, S of them the last of a sequence that samples. Fresh for every step."""

    input_ids: Tensor  # int64 [T]
    sample_at: Tensor  # int64 [S]
    attention: AttentionBatch


def step_input(batch: ScheduledBatch, arrays: StepArrays, device: torch.device) -> StepInput:
    """The arrays of a step on the device."""
    return StepInput(
        input_ids=upload(arrays.input_ids, device),
        sample_at=upload(arrays.sample_at, device),
        attention=AttentionBatch(
            positions=upload(arrays.positions, device),
            slot_mapping=upload(arrays.slot_mapping, device),
            cu_seqlens_q=upload(arrays.cu_seqlens_q, device),
            context_lens=upload(arrays.context_lens, device),
            block_tables=upload(arrays.block_tables, device),
            starts=batch.starts,
            query_lens=batch.query_lens,
            num_decodes=batch.num_decodes,
        ),
    )


def allocate_kv_caches(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[KVCache]:
    """Zeroed keys and values of every layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
    shape = (num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
    if device.type == "cpu":
        # numpy leaves zero pages to the system, which hands out real memory when a block is first written.
        raw = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        pool = torch.from_numpy(raw).view(dtype).view(shape)
    else:
        pool = torch.zeros(shape, dtype=dtype, device=device)
    return [(layer[0], layer[1]) for layer in pool]


class ModelRunner:
    """Owns the KV pool and the state of running sequences; `run` executes one step after the other."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_caches: list[KVCache],
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv_caches = kv_caches
        self._device = device
        self._rows = SequenceRows(max_num_seqs, max_model_len, block_size=kv_caches[0][0].shape[1])
        self._table = SamplingTable(max_num_seqs)
        self._sampler = Sampler(self._table, self._rows, model.kernels, device, model.group)

    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        """`run` behind the interface of runners that do not wait."""
        return CompletedStep(self.run(batch))

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> StepResult:
        """Execute `batch` and return what it sampled; the sampled tokens also go to their rows for the next step."""
        began = time.perf_counter()
        self._rows.update(batch)
        self._table.update(batch)
        arrays = self._rows.step_arrays(batch)
        hidden = self._forward(step_input(batch, arrays, self._device))
        if not len(hidden):
            return StepResult([], device_ms=(time.perf_counter() - began) * 1e3)
        sampled = self._sample(hidden, arrays.sample_rows, arrays.sample_lens)
        token_ids = sampled.token_ids.cpu().numpy()
        self._rows.append_tokens(arrays.sample_rows, arrays.sample_lens, token_ids)
        return StepResult(token_ids.tolist(), sampled.logprobs, device_ms=(time.perf_counter() - began) * 1e3)

    def _forward(self, step: StepInput) -> Tensor:
        """Hidden states [S, H] of the sequences that sample."""
        plan = self._attention.plan(step.attention)
        return self._model.forward(step.input_ids, plan, self._kv_caches, step.sample_at)

    def _sample(self, hidden: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> Sampled:
        """Through all logits, which are cheap to have on one rank; ranks exchange them only where a rule needs them."""
        table = self._table
        if self._model.group.size == 1 or not table.is_plain(rows):
            return self._sampler.sample(self._model.logits(hidden), rows, lengths)
        columns = (table.temperature[rows], table.seed[rows], self._rows.token_indices(rows, lengths))
        temperatures, seeds, token_indices = (upload(column, self._device) for column in columns)
        return Sampled(self._model.sample(hidden, temperatures, seeds, token_indices), None)
