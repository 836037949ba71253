"""How tensor parallelism cuts a model: which heads, features and token ids each rank has. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoinfer.errors import ConfigError
from nanoinfer.models.config import ModelConfig

# Features are cut at multiples of this where that is possible, so that rows stay aligned for wide loads.
FEATURE_UNIT = 16


@dataclass(frozen=True)
class Span:
    """The part start .. stop - 1 of a dimension that has `size` elements in all."""

    size: int
    start: int
    stop: int

    @classmethod
    def whole(cls, size: int) -> Span:
        return cls(size, 0, size)

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return len(self) == self.size

    def shard(self, dim: int) -> tuple[int, int, int] | None:
        """This part of a tensor's dimension `dim` as a `WeightSlot` has it: None where it is all of it."""
        return None if self.is_whole else (dim, self.start, self.stop)

    def times(self, width: int) -> Span:
        """The same part where each element is `width` elements of the dimension."""
        return Span(self.size * width, self.start * width, self.stop * width)


@dataclass(frozen=True)
class Partition:
    """The share of rank `rank` of `size`; every cut is in the order of the ranks, so rank 0 has the first part."""

    rank: int = 0
    size: int = 1

    def query_heads(self, config: ModelConfig) -> Span:
        count = config.num_heads // self.size
        return Span(config.num_heads, self.rank * count, (self.rank + 1) * count)

    def kv_heads(self, config: ModelConfig) -> Span:
        """The KV heads that this rank's query heads read; ranks may have one in common."""
        queries_per_kv, queries = config.num_heads // config.num_kv_heads, self.query_heads(config)
        return Span(config.num_kv_heads, queries.start // queries_per_kv, (queries.stop - 1) // queries_per_kv + 1)

    def kv_copies(self, config: ModelConfig) -> list[int]:
        """For each KV head in this rank's cache, which of `kv_heads` it is, counted from their start.

        Attention wants as many query heads for every KV head. Where the rank's first or last group is cut, the heads
        are repeated until that holds; elsewhere this is 0, 1, 2, ...
        """
        queries, first = self.query_heads(config), self.kv_heads(config).start
        queries_per_kv, count = config.num_heads // config.num_kv_heads, config.kv_heads_per_rank(self.size)
        return [(queries.start + i * len(queries) // count) // queries_per_kv - first for i in range(count)]

    def features(self, size: int) -> Span:
        """A cut of the MLP's inner features, in parts as equal as the alignment allows."""
        unit = FEATURE_UNIT if size % FEATURE_UNIT == 0 and size // FEATURE_UNIT >= self.size else 1
        units = size // unit
        return Span(size, units * self.rank // self.size * unit, units * (self.rank + 1) // self.size * unit)

    def vocabulary(self, size: int) -> Span:
        """Token ids; all ranks have `vocabulary_stride`, except the last ones."""
        stride = self.vocabulary_stride(size)
        return Span(size, min(size, self.rank * stride), min(size, (self.rank + 1) * stride))

    def vocabulary_stride(self, size: int) -> int:
        return math.ceil(size / self.size)


WHOLE = Partition()


def check_splits(config: ModelConfig, tp: int) -> None:
    """ConfigError if the model cannot be cut into `tp` parts."""
    if config.num_heads % tp:
        sizes = [str(n) for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        works = " and ".join(filter(None, [", ".join(sizes[:-1]), sizes[-1]]))
        raise ConfigError(
            f"{config.num_heads} attention heads cannot be split over {tp} ranks; this model works with --tp {works}."
        )
    if min(config.intermediate_size, config.vocab_size // tp) < tp:
        raise ConfigError(f"this model is too small to be split over {tp} ranks; use a smaller --tp.")
