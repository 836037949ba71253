"""OverlappedRunner: launches steps without waiting for them. Sampled tokens stay on the device and feed the next step.

The plain twin is ModelRunner. What differs: decoding sequences take their token from the device's rows, because the
host may not know it yet; results travel to the host behind an event; and steps of decodes only, or of few tokens, are
one CUDA graph each.
"""

from __future__ import annotations

import time
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.attention.base import AttentionBackend
from nanoinfer.engine.batch import ScheduledBatch, StepResult, TokenLogprobs
from nanoinfer.kernels.heads import KVCache
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.cuda_graphs import GraphCache
from nanoinfer.runner.device_rows import DeviceRows
from nanoinfer.runner.executor import step_error
from nanoinfer.runner.graphed_steps import GraphedDecode, GraphedMixed
from nanoinfer.runner.input_batch import SequenceRows, StepArrays
from nanoinfer.runner.model_runner import step_input
from nanoinfer.runner.sampler import Sampler
from nanoinfer.runner.sampling_table import PENALTIES, SamplingTable
from nanoinfer.runner.upload import upload


class PendingStep:
    """A step under way: its token ids are being copied to pinned memory; `result` waits for them."""

    def __init__(
        self,
        token_ids: Tensor | None,
        logprobs: list[TokenLogprobs | None] | None,
        clock: StepClock,
        used_graph: bool,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        """order: the place in the batch of each of token_ids and logprobs, where that is not their own."""
        self._logprobs = logprobs
        self._order = order
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
        logprobs = self._logprobs
        if self._order is not None:
            taken_from = np.argsort(self._order).tolist()
            token_ids = [token_ids[i] for i in taken_from]
            logprobs = None if logprobs is None else [logprobs[i] for i in taken_from]
        return StepResult(token_ids, logprobs, device_ms=device_ms, used_graph=self._used_graph)


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
        max_num_batched_tokens: int,
        max_model_len: int,
        device: torch.device,
        use_graphs: bool,
    ) -> None:
        self._model = model
        self._attention = attention
        self._kv_caches = kv_caches
        self._device = device
        self._as_current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        self._block_size = kv_caches[0][0].shape[1]
        self._rows = SequenceRows(max_num_seqs, max_model_len, self._block_size)
        self._table = SamplingTable(max_num_seqs)
        self._sampler = Sampler(self._table, self._rows, model.kernels, device, model.group)
        self._on_device = DeviceRows(self._rows, self._table, device)
        self._decode = self._mixed = None
        if use_graphs:
            graphs = GraphCache()
            self._decode = GraphedDecode(model, attention, kv_caches, self._on_device, graphs, max_num_seqs)
            self._mixed = GraphedMixed(
                model, attention, kv_caches, self._on_device, graphs, max_num_seqs, max_num_batched_tokens
            )

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> PendingStep:
        """Start `batch` on the device and return at once. Steps run in the order of their launch."""
        # Triton launches on the current device, which another engine may have changed and each thread has its own of.
        with self._as_current:
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> PendingStep:
        clock = StepClock(self._device)
        self._rows.update(batch)
        self._table.update(batch)
        self._on_device.update(batch)
        if self._decode is not None and batch.num_decodes == len(batch.rows):
            return self._launch_decode(self._decode, batch, clock)
        arrays = self._rows.step_arrays(batch)
        mixed = self._mixed
        if (
            mixed
            and self._table.is_plain(arrays.sample_rows)
            and mixed.count_and_accept(len(arrays.input_ids), len(arrays.rows))
        ):
            token_indices = self._rows.token_indices(arrays.sample_rows, arrays.sample_lens)
            token_ids = mixed.run(arrays, batch.num_decodes, token_indices)
            return PendingStep(token_ids, None, clock, used_graph=True)
        return self._launch_eagerly(batch, arrays, clock)

    def _launch_decode(self, decode: GraphedDecode, batch: ScheduledBatch, clock: StepClock) -> PendingStep:
        rows, positions = np.array(batch.rows, np.int64), np.array(batch.starts, np.int64)
        # Longest first: attention's programs start in this order, and a long one that starts last runs alone.
        order = np.argsort(-positions, kind="stable")
        rows, positions = rows[order], positions[order]
        if self._table.is_plain(rows):
            return PendingStep(decode.run(rows, positions, sample=True), None, clock, used_graph=True, order=order)
        logits = decode.run(rows, positions, sample=False)
        return self._sample_from_logits(logits, rows, positions + 1, clock, used_graph=True, order=order)

    def _launch_eagerly(self, batch: ScheduledBatch, arrays: StepArrays, clock: StepClock) -> PendingStep:
        """Any step, without a graph."""
        rows = arrays.sample_rows
        hidden = self._forward(batch, arrays)
        if not len(rows):
            return PendingStep(None, None, clock, used_graph=False)
        if not self._table.is_plain(rows):
            logits = self._model.logits(hidden)
            return self._sample_from_logits(logits, rows, arrays.sample_lens, clock, used_graph=False)
        index, state = upload(rows, self._device), self._on_device
        token_indices = upload(self._rows.token_indices(rows, arrays.sample_lens), self._device)
        token_ids = self._model.sample(hidden, state.temperatures[index], state.seeds[index], token_indices)
        state.last_tokens.index_copy_(0, index, token_ids)
        return PendingStep(token_ids, None, clock, used_graph=False)

    def _sample_from_logits(
        self,
        logits: Tensor,
        rows: NDArray[np.int64],
        lengths: NDArray[np.int64],
        clock: StepClock,
        *,
        used_graph: bool,
        order: NDArray[np.int64] | None = None,
    ) -> PendingStep:
        sampled = self._sampler.sample(logits, rows, lengths)
        self._on_device.last_tokens.index_copy_(0, upload(rows, self._device), sampled.token_ids)
        if (self._table.needs[rows] & PENALTIES).any():
            # Penalties count tokens on the host, so the rows' own are fetched before the next step is launched.
            self._rows.append_tokens(rows, lengths, sampled.token_ids.cpu().numpy())
        return PendingStep(sampled.token_ids, sampled.logprobs, clock, used_graph, order)

    def _forward(self, batch: ScheduledBatch, arrays: StepArrays) -> Tensor:
        """Hidden states [S, H] of the sequences that sample, computed without a graph."""
        step = step_input(batch, arrays, self._device)
        decoding = batch.rows[: batch.num_decodes]
        if decoding:
            step.input_ids[: len(decoding)] = self._on_device.last_tokens[upload(np.array(decoding), self._device)]
        plan = self._attention.plan(step.attention)
        return self._model.forward(step.input_ids, plan, self._kv_caches, step.sample_at)
