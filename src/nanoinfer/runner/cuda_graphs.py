"""CUDA graphs of whole decode steps, one per batch-size bucket and kind, captured when a bucket is first used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# (rows int64 [B], positions int64 [B]) -> the step's output, [B] token ids or [B, V] logits. Position -1 is padding.
DecodeStep = Callable[[Tensor, Tensor], Tensor]


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16, and always max_num_seqs itself: every batch fits one, and none exceeds it."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class DecodeGraphs:
    """Replays `steps[kind]` for any number of sequences up to max_num_seqs.

    All graphs share one memory pool, so an output is only valid until the next replay. `padding_row` fills the places
    of a bucket beyond the batch. Graphs must be dropped before the process group that their collectives use.
    """

    def __init__(self, steps: dict[str, DecodeStep], max_num_seqs: int, padding_row: int, device: torch.device) -> None:
        self._steps = steps
        self._buckets = bucket_sizes(max_num_seqs)
        self._padding_row = padding_row
        self._inputs = torch.empty(2, max_num_seqs, dtype=torch.int64, device=device)
        self._host_inputs = np.empty((2, max_num_seqs), dtype=np.int64)
        self._graphs: dict[tuple[str, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # the first graph makes it

    def replay(self, kind: str, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """The output for the batch's rows [n] at positions [n]: its first n rows."""
        count = len(rows)
        bucket = next(size for size in self._buckets if size >= count)
        if (kind, bucket) not in self._graphs:
            self._graphs[kind, bucket] = self._capture(kind, bucket)
        graph, output = self._graphs[kind, bucket]
        self._host_inputs[0, :count], self._host_inputs[1, :count] = rows, positions
        self._host_inputs[0, count:bucket], self._host_inputs[1, count:bucket] = self._padding_row, -1
        # A fresh pinned buffer each time: the allocator keeps it from being re-used before the copy has run.
        staged = torch.from_numpy(self._host_inputs[:, :bucket]).pin_memory()
        self._inputs[:, :bucket].copy_(staged, non_blocking=True)
        graph.replay()
        return output[:count]

    def _capture(self, kind: str, bucket: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._inputs[0], self._inputs[1] = self._padding_row, -1
        step, inputs = self._steps[kind], self._inputs[:, :bucket]
        # Once outside the graph: kernels are compiled and libraries set up here, and padding changes nothing.
        step(inputs[0], inputs[1])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = step(inputs[0], inputs[1])
        self._pool = self._pool or graph.pool()
        return graph, output
