"""Whole steps as CUDA graphs: decodes of any number of sequences, and short prefills, where Python would cost most."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionBatch, KVCache
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.cuda_graphs import GraphCache, bucket_sizes
from nanoinfer.runner.device_rows import DeviceRows
from nanoinfer.runner.input_batch import StepArrays

Ints = NDArray[np.int64]

PREFILL_TOKENS = (32, 64, 128, 256, 512)  # buckets; longer prefills keep the device busy while Python launches
PREFILL_SEQUENCES = 8


def _copy_in(values: Ints, inputs: Tensor) -> None:
    """Send `values` to the front of a graph's input buffer, in the order of the stream.

    A fresh pinned buffer each time: the allocator keeps it from being used again before the copy has run.
    """
    inputs[: len(values)].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


class GraphedDecode:
    """One decode step of n sequences, in the graph of the next larger bucket; padding is the padding row at -1."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_caches: list[KVCache],
        rows: DeviceRows,
        graphs: GraphCache,
        max_num_seqs: int,
    ) -> None:
        self._model, self._attention, self._kv_caches = model, attention, kv_caches
        self._rows = rows
        self._graphs = graphs
        self._buckets = bucket_sizes(max_num_seqs)
        self._block_size = kv_caches[0][0].shape[1]
        self._inputs = torch.empty(2 * max_num_seqs, dtype=torch.int64, device=rows.last_tokens.device)
        self._logits: Tensor | None = None  # float32 [max_num_seqs, V], for the graphs of all buckets

    def run(self, rows: Ints, positions: Ints, *, sample: bool) -> Tensor:
        """rows, positions [n] -> token ids [n] (also written to the rows), or logits float32 [n, V].

        The logits may be changed in place; the next run overwrites them.
        """
        count = len(rows)
        bucket = next(size for size in self._buckets if size >= count)
        key = ("decode", bucket, sample)
        if key not in self._graphs:
            self._fill(bucket, rows[:0], positions[:0])
            if not sample and self._logits is None:
                shape = (self._buckets[-1], self._model.config.vocab_size)
                self._logits = torch.empty(shape, dtype=torch.float32, device=self._inputs.device)
            self._graphs.capture(key, lambda: self._step(bucket, sample))
        self._fill(bucket, rows, positions)
        return self._graphs.replay(key)[:count]

    def _fill(self, bucket: int, rows: Ints, positions: Ints) -> None:
        padded = np.empty((2, bucket), np.int64)
        padded[0], padded[1] = self._rows.padding_row, -1
        padded[0, : len(rows)], padded[1, : len(rows)] = rows, positions
        _copy_in(padded.ravel(), self._inputs)

    def _step(self, bucket: int, sample: bool) -> Tensor:
        rows, positions = self._inputs[: 2 * bucket].view(2, bucket)
        state, size = self._rows, self._block_size
        tables = state.block_tables[rows]
        known = positions.clamp(min=0)
        blocks = tables.gather(1, (known // size)[:, None]).squeeze(1).to(torch.int64)
        batch = AttentionBatch(
            positions=known,
            slot_mapping=torch.where(positions < 0, -1, blocks * size + known % size),
            cu_seqlens_q=torch.arange(bucket + 1, dtype=torch.int32, device=rows.device),
            context_lens=(positions + 1).to(torch.int32),
            block_tables=tables,
            starts=[],
            query_lens=[],
            num_decodes=bucket,
        )
        plan = self._attention.plan(batch)
        hidden = self._model.forward(state.last_tokens[rows], plan, self._kv_caches, None)
        if not sample:
            assert self._logits is not None
            return self._logits[:bucket].copy_(self._model.logits(hidden))
        token_indices = positions + 1 - state.prompt_lens[rows]
        token_ids = self._model.sample(hidden, state.temperatures[rows], state.seeds[rows], token_indices)
        state.last_tokens.index_copy_(0, rows, token_ids)
        return token_ids


class GraphedPrefill:
    """A step of a few prefills that are short together and all complete; their tokens come from the host."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_caches: list[KVCache],
        rows: DeviceRows,
        graphs: GraphCache,
    ) -> None:
        self._model, self._attention, self._kv_caches = model, attention, kv_caches
        self._rows = rows
        self._graphs = graphs
        # One buffer, so that a step's inputs are one copy: 3 arrays per token, 5 per sequence (cumulative ends too).
        size = 3 * PREFILL_TOKENS[-1] + 5 * PREFILL_SEQUENCES
        self._inputs = torch.empty(size, dtype=torch.int64, device=rows.last_tokens.device)

    @staticmethod
    def accepts(num_tokens: int, num_sequences: int) -> bool:
        return num_tokens <= PREFILL_TOKENS[-1] and num_sequences <= PREFILL_SEQUENCES

    def run(self, arrays: StepArrays, token_indices: Ints) -> Tensor:
        """Sequences that all sample; token_indices [n] count output tokens -> token ids [n], also in the rows."""
        num_tokens, count = len(arrays.input_ids), len(arrays.sample_rows)
        bucket = next(size for size in PREFILL_TOKENS if size >= num_tokens)
        key = ("prefill", bucket)
        if key not in self._graphs:
            self._fill(bucket, 0, 0, None, np.empty(0, np.int64))
            self._graphs.capture(key, lambda: self._step(bucket))
        self._fill(bucket, num_tokens, count, arrays, token_indices)
        return self._graphs.replay(key)[:count]

    def _fill(self, bucket: int, tokens: int, count: int, arrays: StepArrays | None, token_indices: Ints) -> None:
        """Padding: tokens that no sequence owns and nobody stores, and sequences without tokens."""
        per_token = np.zeros((3, bucket), np.int64)
        per_token[2] = -1
        per_sequence = np.zeros((5, PREFILL_SEQUENCES), np.int64)
        per_sequence[0] = self._rows.padding_row
        per_sequence[1] = tokens  # where each sequence ends
        if arrays is not None:
            per_token[:, :tokens] = arrays.input_ids, arrays.positions, arrays.slot_mapping
            per_sequence[0, :count] = arrays.sample_rows
            per_sequence[1, :count] = arrays.cu_seqlens_q[1:]
            per_sequence[2, :count] = arrays.context_lens
            per_sequence[3, :count] = arrays.sample_at
            per_sequence[4, :count] = token_indices
        _copy_in(np.concatenate([per_token.ravel(), per_sequence.ravel()]), self._inputs)

    def _step(self, bucket: int) -> Tensor:
        input_ids, positions, slots = self._inputs[: 3 * bucket].view(3, bucket)
        end = 3 * bucket + 5 * PREFILL_SEQUENCES
        rows, ends, lengths, sample_at, token_indices = self._inputs[3 * bucket : end].view(5, PREFILL_SEQUENCES)
        state = self._rows
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=torch.cat((torch.zeros_like(ends[:1]), ends)).to(torch.int32),
            context_lens=lengths.to(torch.int32),
            block_tables=state.block_tables[rows],
            # On the host only the most that could be is known: history everywhere, a bucket's worth of queries each.
            starts=[1] * PREFILL_SEQUENCES,
            query_lens=[bucket] * PREFILL_SEQUENCES,
            num_decodes=0,
        )
        hidden = self._model.forward(input_ids, self._attention.plan(batch), self._kv_caches, sample_at)
        token_ids = self._model.sample(hidden, state.temperatures[rows], state.seeds[rows], token_indices)
        state.last_tokens.index_copy_(0, rows, token_ids)
        return token_ids
