"""The cuts of tensor parallelism: nothing is left out or double but KV heads, and attention groups are even."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_model_config import LLAMA31_8B, QWEN3_06B, SMOLLM2, parse

from nanoinfer.errors import ConfigError
from nanoinfer.models.partition import Partition, check_splits

HEADS = [(8, 8), (16, 8), (40, 10), (14, 2), (9, 3), (7, 1), (6, 2), (64, 4)]


def test_every_cut_covers_its_dimension_once_and_in_order() -> None:
    for size in (100, 176, 177, 1536, 151_936 % 4096):
        for tp in (1, 2, 3, 4, 7, 8, 9):
            ranks = [Partition(rank, tp) for rank in range(tp)]
            for spans in ([p.features(size) for p in ranks], [p.vocabulary(size) for p in ranks]):
                assert [i for span in spans for i in range(span.start, span.stop)] == list(range(size))
            assert all(len(p.vocabulary(size)) == p.vocabulary_stride(size) for p in ranks[:-1]) or size < tp * tp
            widths = [len(p.features(size)) for p in ranks]
            assert max(widths) - min(widths) <= 16


def test_every_query_head_finds_its_kv_head_in_its_rank_s_cache() -> None:
    base = parse(LLAMA31_8B)
    for heads, kv_heads in HEADS:
        config = replace(base, num_heads=heads, num_kv_heads=kv_heads)
        for tp in (n for n in range(1, heads + 1) if heads % n == 0):
            for partition in (Partition(rank, tp) for rank in range(tp)):
                queries, kept = partition.query_heads(config), partition.kv_heads(config)
                copies = partition.kv_copies(config)
                assert len(queries) % len(copies) == 0
                assert sorted(set(copies)) == list(range(len(kept)))
                for i in range(len(queries)):
                    cached = copies[i // (len(queries) // len(copies))]
                    assert kept.start + cached == (queries.start + i) // (heads // kv_heads)
            if kv_heads % tp == 0:
                assert config.kv_heads_per_rank(tp) == kv_heads // tp
            elif tp % kv_heads == 0:
                assert config.kv_heads_per_rank(tp) == 1


def test_sizes_that_cannot_work_are_refused_with_those_that_can() -> None:
    for tp in (1, 2, 4, 8, 16):
        check_splits(parse(QWEN3_06B), tp)
    with pytest.raises(ConfigError, match=r"works with --tp 1, 3 and 9\."):
        check_splits(parse(SMOLLM2), 2)
    with pytest.raises(ConfigError, match="too small"):
        check_splits(replace(parse(SMOLLM2), vocab_size=20), 9)
