"""Group: what the ranks of tensor parallelism exchange. This is the group of a single rank, where nothing is."""

from __future__ import annotations

from torch import Tensor

from nanoinfer.models.partition import WHOLE, Partition


class Group:
    """Collective operations: every rank must call them in the same order with tensors of the same shape and dtype.

    Those on tensors neither wait for the device nor read from it, so that they can be part of a CUDA graph.
    `ranks_on_host` counts this host's ranks, which share its memory.
    """

    def __init__(self, partition: Partition = WHOLE, ranks_on_host: int = 1) -> None:
        self.partition = partition
        self.ranks_on_host = ranks_on_host

    @property
    def rank(self) -> int:
        return self.partition.rank

    @property
    def size(self) -> int:
        return self.partition.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, bit for bit the same on each; x's own memory may be overwritten with it."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """x [...] of every rank -> [size, ...]."""
        return x[None]

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x on every rank; x's own memory may be overwritten with it."""
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values."""
        return value

    def abort(self) -> None:
        """Make operations that are under way fail, from any thread."""

    def close(self) -> None:
        """Give back what the group holds. CUDA graphs with its operations must be gone."""


ALONE = Group()
