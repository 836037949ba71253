"""OverlappedRunner: launches steps without waiting for them. Sampled tokens stay on the device and feed the next step.

The plain twin is ModelRunner. What differs: decoding sequences take their token from the device's rows, because the
host may not know it yet; results travel to the host behind an event; and a pure decode step is one CUDA graph.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, AttentionBatch, KVCache
from nanoinfer.engine.batch import ScheduledBatch, StepResult, TokenLogprobs
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.cuda_graphs import DecodeGraphs, DecodeStep
from nanoinfer.runner.device_rows import DeviceRows
from nanoinfer.runner.input_batch import SequenceRows
from nanoinfer.runner.model_runner import step_input
from nanoinfer.runner.sampler import Sampler
from nanoinfer.runner.sampling_table import PENALTIES, RANDOM, SamplingTable


class PendingStep:
    """A step under way: its token ids are being copied to pinned memory; `result` waits for them."""

    def __init__(
        self, token_ids: Tensor | None, logprobs: list[TokenLogprobs | None] | None, clock: StepClock, used_graph: bool
    ) -> None:
        self._logprobs = logprobs
        self._used_graph = used_graph
        self._token_ids = token_ids
        if token_ids is not None and token_ids.is_cuda:
            self._token_ids = torch.empty(token_ids.shape, dtype=token_ids.dtype, pin_memory=True)
            self._token_ids.copy_(token_ids, non_blocking=True)
        self._clock = clock
        clock.stop()

    def result(self) -> StepResult:
        device_ms = self._clock.wait()
        token_ids = [] if self._token_ids is None else self._token_ids.tolist()
        return StepResult(token_ids, self._logprobs, device_ms=device_ms, used_graph=self._used_graph)


class StepClock:
    """Milliseconds that a step takes on the device: between CUDA events, or on the host's clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._events = None
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._events = (began, ended)
            self._events[0].record()
        self._began = self._ended = time.perf_counter()

    def stop(self) -> None:
        self._ended = time.perf_counter()
        if self._events is not None:
            self._events[1].record()

    def wait(self) -> float:
        """Wait until the step has run; returns its milliseconds."""
        if self._events is None:
            return (self._ended - self._began) * 1e3
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1]))


class OverlappedRunner:
    """Owns the KV pool and the state of running sequences on host and device. Any device; graphs on CUDA."""

    def __init__(
        self,
        model: Decoder,
        attention: AttentionBackend,
        kv_caches: list[KVCache],
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        use_graphs: bool,
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv_caches = kv_caches
        self._device = device
        self._block_size = kv_caches[0][0].shape[1]
        self._rows = SequenceRows(max_num_seqs, max_model_len, self._block_size)
        self._table = SamplingTable(max_num_seqs)
        self._sampler = Sampler(self._table, self._rows, device)
        self._on_device = DeviceRows(self._rows, self._table, device, self._upload)
        self._graphs = None
        if use_graphs:
            steps: dict[str, DecodeStep] = {"sample": self._decode_and_sample, "logits": self._decode_to_logits}
            self._graphs = DecodeGraphs(steps, max_num_seqs, self._on_device.padding_row, device)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self._device.type != "cuda":
            return tensor.to(self._device, copy=True)
        # The pinned allocator knows of the copy under way and does not hand the buffer out before it has run.
        return tensor.pin_memory().to(self._device, non_blocking=True)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start `batch` on the device and return at once. Steps run in the order of their launch."""
        clock = StepClock(self._device)
        self._rows.update(batch)
        for sequence in batch.new_sequences:
            self._table.insert(sequence)
        self._on_device.update(batch)
        sampling = np.array([row for row, samples in zip(batch.rows, batch.samples, strict=True) if samples], np.int64)
        needs = self._table.needs[sampling]
        plain = not (needs & ~np.uint8(RANDOM)).any()  # nothing beyond argmax and temperature
        use_graph = self._graphs is not None and batch.num_decodes == len(batch.rows)
        if not len(sampling):
            self._forward(batch)
            return PendingStep(None, None, clock, used_graph=False)
        lengths = np.array(
            [s + c for s, c, samples in zip(batch.starts, batch.counts, batch.samples, strict=True) if samples],
            np.int64,
        )
        logprobs = None
        if use_graph:
            assert self._graphs is not None
            output = self._graphs.replay("sample" if plain else "logits", sampling, lengths - 1)
        else:
            hidden = self._forward(batch)
            output = self._sample(hidden, sampling, lengths) if plain else self._model.logits(hidden)
        if not plain:
            # The graph's logits are overwritten by its next replay, and the sampler changes its input.
            sampled = self._sampler.sample(output.clone(), sampling, lengths)
            output, logprobs = sampled.token_ids, sampled.logprobs
        if not (use_graph and plain):
            self._on_device.last_tokens.index_copy_(0, self._upload(sampling), output)
        if (needs & PENALTIES).any():
            # Penalties count tokens on the host, so the rows' own are fetched before the next step is launched.
            self._rows.append_tokens(sampling, lengths, output.cpu().numpy())
        return PendingStep(output, logprobs, clock, used_graph=use_graph)

    def _forward(self, batch: ScheduledBatch) -> Tensor:
        """Hidden states [S, H] of the sequences that sample, computed without a graph."""
        step = step_input(batch, self._rows.step_arrays(batch), self._upload)
        decoding = batch.rows[: batch.num_decodes]
        if decoding:
            step.input_ids[: len(decoding)] = self._on_device.last_tokens[self._upload(np.array(decoding))]
        return self._model.forward(
            step.input_ids, self._attention.plan(step.attention), self._kv_caches, step.last_tokens
        )

    def _sample(self, hidden: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> Tensor:
        index = self._upload(rows)
        state = self._on_device
        token_indices = self._upload(lengths - self._rows.prompt_lens[rows])
        return self._model.sample(hidden, state.temperatures[index], state.seeds[index], token_indices)

    # -- what the graphs hold; every tensor here is of fixed size and address ----------------------------------------

    def _decode(self, rows: Tensor, positions: Tensor) -> Tensor:
        """One decode step of a bucket: rows, positions int64 [B], padding at position -1 -> hidden [B, H]."""
        state, size = self._on_device, self._block_size
        tables = state.block_tables[rows]
        known = positions.clamp(min=0)
        blocks = tables.gather(1, (known // size)[:, None]).squeeze(1).to(torch.int64)
        slots = torch.where(positions < 0, -1, blocks * size + known % size)
        step = AttentionBatch(
            positions=known,
            slot_mapping=slots,
            cu_seqlens_q=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            context_lens=(positions + 1).to(torch.int32),
            block_tables=tables,
            starts=[],
            query_lens=[],
            num_decodes=len(rows),
        )
        return self._model.forward(state.last_tokens[rows], self._attention.plan(step), self._kv_caches, None)

    def _decode_and_sample(self, rows: Tensor, positions: Tensor) -> Tensor:
        state = self._on_device
        token_indices = positions + 1 - state.prompt_lens[rows]
        hidden = self._decode(rows, positions)
        token_ids = self._model.sample(hidden, state.temperatures[rows], state.seeds[rows], token_indices)
        state.last_tokens.index_copy_(0, rows, token_ids)
        return token_ids

    def _decode_to_logits(self, rows: Tensor, positions: Tensor) -> Tensor:
        return self._model.logits(self._decode(rows, positions))
