"""CUDA graphs by key, captured when a key is first used, all in one memory pool."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 16, and always max_num_seqs itself: every batch fits one, and none exceeds it."""
    sizes = [1, 2, 4, 8, *range(16, max_num_seqs, 16)]
    return [*(size for size in sizes if size < max_num_seqs), max_num_seqs]


class GraphCache:
    """Captured steps. What one frees the others use, so an output is valid until the next replay of any of them.

    The cache keeps every output alive, so a large one should be a view of a buffer that its steps share.
    Graphs must be dropped before the process group that their collectives use.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # the first graph makes it

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def capture(self, key: Hashable, step: Callable[[], Tensor]) -> None:
        """Record `step`, whose inputs are at fixed addresses and hold padding that changes nothing when it runs."""
        # Once outside the graph: kernels are compiled and libraries set up here.
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = _capture_stream(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            output = step()
        self._pool = self._pool or graph.pool()
        self._graphs[key] = (graph, output)

    def replay(self, key: Hashable) -> Tensor:
        """Launch the step on what its inputs hold now; returns its output, which is being computed."""
        graph, output = self._graphs[key]
        graph.replay()
        return output


@cache
def _capture_stream(device_index: int) -> torch.cuda.Stream:
    """One for each device. torch's own default is one for all, on whichever device it was first used."""
    return torch.cuda.Stream(device_index)  # type: ignore[no-untyped-call]
