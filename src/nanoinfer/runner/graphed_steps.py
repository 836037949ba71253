"""Whole steps as CUDA graphs: decodes of any number of sequences, and mixed steps of up to a few thousand tokens."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionBatch
from nanoinfer.kernels.heads import KVCache
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.cuda_graphs import GraphCache, bucket_sizes
from nanoinfer.runner.device_rows import DeviceRows
from nanoinfer.runner.input_batch import StepArrays

Ints = NDArray[np.int64]

MIXED_TOKENS = (32, 64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)  # longer steps keep the device busy by themselves
FEW_SEQUENCES = 8  # steps of so few have graphs of their own, since each sequence costs a row of the LM head


def _copy_in(values: Ints, inputs: Tensor) -> None:
    """Send `values` to the front of a graph's input buffer, in the order of the stream.

    A fresh pinned buffer each time: the allocator keeps it from being used again before the copy has run.
    """
    inputs[: len(values)].copy_(torch.from_numpy(values).pin_memory(), non_blocking=True)


class Bucket(NamedTuple):
    """The sizes of a graph's inputs."""

    tokens: int
    sequences: int


class GraphedDecode:
    """One decode step of n sequences, in the graph of the next larger bucket; padding is the padding row at -1.

    A step moves the positions on by one on the device, so while the same sequences decode, `_inputs` stays as it is.
    """

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
        device = rows.last_tokens.device
        self._inputs = torch.empty(2 * max_num_seqs, dtype=torch.int64, device=device)
        self._on_device: tuple[int, Ints, Ints] | None = None  # bucket, rows and positions that _inputs holds
        self._starts = torch.arange(self._buckets[-1] + 1, dtype=torch.int32, device=device)
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
        if not self._holds(bucket, rows, positions):
            self._fill(bucket, rows, positions)
        self._on_device = None  # until the replay is under way, whatever interrupts it
        output = self._graphs.replay(key)[:count]
        self._on_device = (bucket, rows, positions + 1)
        return output

    def _holds(self, bucket: int, rows: Ints, positions: Ints) -> bool:
        if self._on_device is None or self._on_device[0] != bucket:
            return False
        return np.array_equal(self._on_device[1], rows) and np.array_equal(self._on_device[2], positions)

    def _fill(self, bucket: int, rows: Ints, positions: Ints) -> None:
        self._on_device = None
        padded = np.empty((2, bucket), np.int64)
        padded[0], padded[1] = self._rows.padding_row, -1
        padded[0, : len(rows)], padded[1, : len(rows)] = rows, positions
        _copy_in(padded.ravel(), self._inputs)

    def _step(self, bucket: int, sample: bool) -> Tensor:
        rows, positions = self._inputs[: 2 * bucket].view(2, bucket)
        inputs = self._model.kernels.decode_inputs(rows, positions, self._rows.state, self._block_size)
        batch = AttentionBatch(
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            cu_seqlens_q=self._starts[: bucket + 1],
            context_lens=inputs.context_lens,
            block_tables=inputs.block_tables,
            starts=[],
            query_lens=[],
            num_decodes=bucket,
        )
        plan = self._attention.plan(batch)
        hidden = self._model.forward(inputs.token_ids, plan, self._kv_caches, None)
        if not sample:
            assert self._logits is not None
            return self._logits[:bucket].copy_(self._model.logits(hidden))
        token_ids = self._model.sample(hidden, inputs.temperatures, inputs.seeds, inputs.token_indices)
        self._rows.last_tokens.index_copy_(0, rows, token_ids)
        return token_ids


class GraphedMixed:
    """A step of decodes and prefill chunks in any mix, with so few tokens that Python would cost more than the device.

    Every sequence goes through the prefill kernels, a decode as a chunk of one token. Decodes come first in a batch, so
    token i is that of sequence i for each of them; its id is the newest in the device's rows.
    """

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_caches: list[KVCache],
        rows: DeviceRows,
        graphs: GraphCache,
        max_num_seqs: int,
        max_num_tokens: int,
    ) -> None:
        self._model, self._attention, self._kv_caches = model, attention, kv_caches
        self._rows = rows
        self._graphs = graphs
        largest = min(MIXED_TOKENS[-1], max_num_tokens)
        self._token_buckets = [*(size for size in MIXED_TOKENS if size < largest), largest]
        self._sequence_buckets = sorted({min(FEW_SEQUENCES, max_num_seqs), max_num_seqs})
        self._uses: Counter[Bucket] = Counter()
        # One buffer, so that a step's inputs are one copy: 3 arrays per token, 6 per sequence.
        size = 3 * largest + 6 * max_num_seqs
        self._inputs = torch.empty(size, dtype=torch.int64, device=rows.last_tokens.device)

    def count_and_accept(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether to run such a step here. The first of a bucket is only counted: a capture costs as much as ten."""
        if num_tokens > self._token_buckets[-1]:
            return False
        bucket = self._bucket(num_tokens, num_sequences)
        self._uses[bucket] += 1
        return self._uses[bucket] > 1

    def _bucket(self, num_tokens: int, num_sequences: int) -> Bucket:
        return Bucket(
            next(size for size in self._token_buckets if size >= num_tokens),
            next(size for size in self._sequence_buckets if size >= num_sequences),
        )

    def run(self, arrays: StepArrays, num_decodes: int, token_indices: Ints) -> Tensor:
        """token_indices [S] count output tokens -> token ids [S] of the sequences that sample, also in the rows."""
        bucket = self._bucket(len(arrays.input_ids), len(arrays.rows))
        if bucket not in self._graphs:
            _copy_in(self._padded(bucket, None, 0, token_indices), self._inputs)
            self._graphs.capture(bucket, lambda: self._step(bucket))
        _copy_in(self._padded(bucket, arrays, num_decodes, token_indices), self._inputs)
        return self._graphs.replay(bucket)[: len(arrays.sample_rows)]

    def _padded(self, bucket: Bucket, arrays: StepArrays | None, num_decodes: int, token_indices: Ints) -> Ints:
        """The inputs of a step, `arrays`' and padding: tokens that no sequence owns and nobody stores, and sequences
        without tokens. An id of -1 is the newest of its row."""
        per_token = np.zeros((3, bucket.tokens), np.int64)  # id, position, slot
        # Three for every sequence: row, where its tokens end, context length; three for each that samples: row, place
        # of its last token, index of its next output token.
        per_sequence = np.zeros((6, bucket.sequences), np.int64)
        per_token[2] = -1
        per_sequence[[0, 3]] = self._rows.padding_row
        per_sequence[4] = -1
        if arrays is not None:
            tokens, sequences, sampling = len(arrays.input_ids), len(arrays.rows), len(arrays.sample_rows)
            per_token[:, :tokens] = arrays.input_ids, arrays.positions, arrays.slot_mapping
            per_token[0, :num_decodes] = -1
            per_sequence[1] = tokens  # those of padding are none, behind the last one
            per_sequence[:3, :sequences] = arrays.rows, arrays.cu_seqlens_q[1:], arrays.context_lens
            per_sequence[3:, :sampling] = arrays.sample_rows, arrays.sample_at, token_indices
        return np.concatenate([per_token.ravel(), per_sequence.ravel()])

    def _step(self, bucket: Bucket) -> Tensor:
        state, split = self._rows, 3 * bucket.tokens
        input_ids, positions, slots = self._inputs[:split].view(3, -1)
        per_sequence = self._inputs[split : split + 6 * bucket.sequences].view(6, -1)
        rows, ends, context_lens, sample_rows, sample_at, token_indices = per_sequence
        most = min(bucket)  # decodes that there can be: they come first, each one token and one sequence
        newest = torch.where(input_ids[:most] < 0, state.last_tokens[rows[:most]], input_ids[:most])
        batch = AttentionBatch(
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=torch.cat((torch.zeros_like(ends[:1]), ends)).to(torch.int32),
            context_lens=context_lens.to(torch.int32),
            block_tables=state.block_tables[rows],
            # On the host only the most that could be is known: history everywhere, a bucket's worth of queries each.
            starts=[1] * bucket.sequences,
            query_lens=[bucket.tokens] * bucket.sequences,
            num_decodes=0,
        )
        hidden = self._model.forward(
            torch.cat((newest, input_ids[most:])), self._attention.plan(batch), self._kv_caches, sample_at
        )
        temperatures, seeds = state.temperatures[sample_rows], state.seeds[sample_rows]
        token_ids = self._model.sample(hidden, temperatures, seeds, token_indices)
        state.last_tokens.index_copy_(0, sample_rows, token_ids)
        return token_ids
