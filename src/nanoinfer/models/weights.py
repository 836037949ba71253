"""WeightSlot: where one tensor of a checkpoint goes. The decoder makes the slots, the loader fills them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WeightSlot:
    """The destination of one checkpoint tensor.

    `target` is a view into a parameter (possibly a fused one) with the shape of what this rank keeps; `shape` is the
    tensor's full shape in the checkpoint; `shard` = (dim, start, stop) is this rank's slice of it, None for all.
    """

    target: Tensor
    shape: tuple[int, ...]
    shard: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        expected = list(self.shape)
        if self.shard is not None:
            dim, start, stop = self.shard
            assert 0 <= start <= stop <= self.shape[dim], (self.shape, self.shard)
            expected[dim] = stop - start
        assert tuple(self.target.shape) == tuple(expected), (self.target.shape, expected)
