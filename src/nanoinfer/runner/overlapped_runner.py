"""OverlappedRunner: launches steps without waiting for them. Sampled tokens stay on the device and feed the next step.

The plain twin is ModelRunner. What differs: decoding sequences take their token from the device's rows, because the
host may not know it yet; results travel to the host behind an event; and steps of decodes only, or of short whole
prefills only, are one CUDA graph each.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend, KVCache
from nanoinfer.engine.batch import ScheduledBatch, StepResult, TokenLogprobs
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.cuda_graphs import GraphCache
from nanoinfer.runner.device_rows import DeviceRows
from nanoinfer.runner.executor import step_error
from nanoinfer.runner.graphed_steps import GraphedDecode, GraphedPrefill
from nanoinfer.runner.input_batch import SequenceRows, StepArrays
from nanoinfer.runner.model_runner import step_input
from nanoinfer.runner.sampler import Sampler
from nanoinfer.runner.sampling_table import PENALTIES, RANDOM, SamplingTable
from nanoinfer.runner.upload import upload


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
        try:
            device_ms = self._clock.wait()
        except RuntimeError as error:  # a kernel's error shows where the host next waits
            raise step_error(error) from error
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
        self._sampler = Sampler(self._table, self._rows, model.kernels, device)
        self._on_device = DeviceRows(self._rows, self._table, device)
        self._decode = self._prefill = None
        if use_graphs:
            graphs = GraphCache()
            self._decode = GraphedDecode(model, attention, kv_caches, self._on_device, graphs, max_num_seqs)
            self._prefill = GraphedPrefill(model, attention, kv_caches, self._on_device, graphs)

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start `batch` on the device and return at once. Steps run in the order of their launch."""
        clock = StepClock(self._device)
        self._rows.update(batch)
        for sequence in batch.new_sequences:
            self._table.insert(sequence)
        self._on_device.update(batch)
        if self._decode is not None and batch.num_decodes == len(batch.rows):
            return self._launch_decode(self._decode, batch, clock)
        arrays = self._rows.step_arrays(batch)
        if self._prefill is not None and self._suits_prefill_graph(batch, arrays):
            return self._launch_prefill(self._prefill, arrays, clock)
        return self._launch_mixed(batch, arrays, clock)

    def _launch_decode(self, decode: GraphedDecode, batch: ScheduledBatch, clock: StepClock) -> PendingStep:
        rows, positions = np.array(batch.rows, np.int64), np.array(batch.starts, np.int64)
        if self._is_plain(rows):
            return PendingStep(decode.run(rows, positions, sample=True), None, clock, used_graph=True)
        logits = decode.run(rows, positions, sample=False)
        return self._sample_from_logits(logits, rows, positions + 1, clock, used_graph=True)

    def _launch_prefill(self, prefill: GraphedPrefill, arrays: StepArrays, clock: StepClock) -> PendingStep:
        return PendingStep(prefill.run(arrays, self._token_indices(arrays)), None, clock, used_graph=True)

    def _launch_mixed(self, batch: ScheduledBatch, arrays: StepArrays, clock: StepClock) -> PendingStep:
        """Any step, without a graph."""
        rows = arrays.sample_rows
        hidden = self._forward(batch, arrays)
        if not len(rows):
            return PendingStep(None, None, clock, used_graph=False)
        if not self._is_plain(rows):
            logits = self._model.logits(hidden)
            return self._sample_from_logits(logits, rows, arrays.sample_lens, clock, used_graph=False)
        index, state = upload(rows, self._device), self._on_device
        token_indices = upload(self._token_indices(arrays), self._device)
        token_ids = self._model.sample(hidden, state.temperatures[index], state.seeds[index], token_indices)
        state.last_tokens.index_copy_(0, index, token_ids)
        return PendingStep(token_ids, None, clock, used_graph=False)

    def _suits_prefill_graph(self, batch: ScheduledBatch, arrays: StepArrays) -> bool:
        """Whether all sequences are prefills that end in this step, short together and plainly sampled."""
        return (
            not batch.num_decodes
            and len(arrays.sample_rows) == len(batch.rows)
            and GraphedPrefill.accepts(len(arrays.input_ids), len(batch.rows))
            and self._is_plain(arrays.sample_rows)
        )

    def _token_indices(self, arrays: StepArrays) -> NDArray[np.int64]:
        """[S]: which of its output tokens each sampling sequence is about to get."""
        return arrays.sample_lens - self._rows.prompt_lens[arrays.sample_rows]

    def _is_plain(self, rows: NDArray[np.int64]) -> bool:
        """Whether nothing beyond argmax and temperature is asked for, which steps do without leaving the device."""
        return not (self._table.needs[rows] & ~np.uint8(RANDOM)).any()

    def _sample_from_logits(
        self, logits: Tensor, rows: NDArray[np.int64], lengths: NDArray[np.int64], clock: StepClock, *, used_graph: bool
    ) -> PendingStep:
        sampled = self._sampler.sample(logits, rows, lengths)
        self._on_device.last_tokens.index_copy_(0, upload(rows, self._device), sampled.token_ids)
        if (self._table.needs[rows] & PENALTIES).any():
            # Penalties count tokens on the host, so the rows' own are fetched before the next step is launched.
            self._rows.append_tokens(rows, lengths, sampled.token_ids.cpu().numpy())
        return PendingStep(sampled.token_ids, sampled.logprobs, clock, used_graph=used_graph)

    def _forward(self, batch: ScheduledBatch, arrays: StepArrays) -> Tensor:
        """Hidden states [S, H] of the sequences that sample, computed without a graph."""
        step = step_input(batch, arrays, self._device)
        decoding = batch.rows[: batch.num_decodes]
        if decoding:
            step.input_ids[: len(decoding)] = self._on_device.last_tokens[upload(np.array(decoding), self._device)]
        plan = self._attention.plan(step.attention)
        return self._model.forward(step.input_ids, plan, self._kv_caches, step.sample_at)
