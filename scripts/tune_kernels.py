"""Sweep the launch configurations of the Triton kernels on a GPU: which tile, warps, stages and splits are fastest.

    python scripts/tune_kernels.py [--out FILE] [--sections gemv,decode] [--processes 12]

The configurations that the kernels choose by themselves are the outcome; benchmarks/kernels_gpu.py times those.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import kernel_cases as cases
from gpu_harness import QWEN3_0_6B, QWEN3_8B, TOY, Bench, Sections, main

from nanoinfer.kernels.decode_attention import DecodeConfig
from nanoinfer.kernels.gemv import GemvConfig, gemv
from nanoinfer.kernels.prefill_attention import PrefillConfig
from nanoinfer.kernels.skinny_matmul import SkinnyConfig, skinny_matmul


def section_gemv(bench: Bench) -> None:
    if bench.tiny:
        cases.linear_chain(bench, TOY, 1, gemv, "gemv", [GemvConfig(2, 1)])
        return
    configs = [GemvConfig(rows, warps) for rows, warps in itertools.product((1, 2, 4, 8), (1, 2, 4, 8))]
    for model in (QWEN3_0_6B, QWEN3_8B):
        cases.linear_chain(bench, model, 1, gemv, "gemv", configs)


def section_skinny(bench: Bench) -> None:
    if bench.tiny:
        cases.linear_chain(bench, TOY, 5, skinny_matmul, "skinny", [SkinnyConfig(8, 2, 32)])
        return
    tiles = (
        (8, 4, 256),
        (16, 4, 256),
        (32, 4, 256),
        (16, 4, 128),
        (8, 8, 128),
        (16, 8, 128),
        (16, 8, 256),
        (32, 8, 128),
    )
    for tokens in (2, 8, 16, 32):
        cases.linear_chain(bench, QWEN3_0_6B, tokens, skinny_matmul, "skinny", [SkinnyConfig(*tile) for tile in tiles])


def section_decode(bench: Bench) -> None:
    if bench.tiny:
        cases.decode(bench, TOY, 3, 40, 16, [DecodeConfig(32, 4, 2, splits) for splits in (1, 2)], (16, 32))
        return
    tiles = ((64, 4, 3), (128, 4, 2), (64, 2, 3))
    for batch, splits in (
        (1, (16, 32)),
        (2, (8, 16, 32)),
        (4, (4, 8, 16)),
        (8, (2, 4, 8)),
        (16, (1, 2, 3, 4)),
        (32, (1, 2)),
    ):
        configs = [DecodeConfig(*tile, count) for tile, count in itertools.product(tiles, splits)]
        for context in (384, 1024):
            cases.decode(bench, QWEN3_0_6B, batch, context, 16, configs, (128,), (True, False))
    for batch, context in ((64, 1024), (256, 1024)):
        configs = [DecodeConfig(*tile, 1) for tile in (*tiles, (64, 4, 4), (128, 4, 3))]
        cases.decode(bench, QWEN3_0_6B, batch, context, 16, configs, (128,), (False,))


def section_prefill(bench: Bench) -> None:
    if bench.tiny:
        cases.prefill(bench, TOY, [20, 70], (16,), [PrefillConfig(32, 32, 4, 2)])
        return
    tiles = ((128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (128, 64, 8, 4))
    configs = [PrefillConfig(*tile, use_tma) for tile, use_tma in itertools.product(tiles, (True, False))]
    cases.prefill(bench, QWEN3_0_6B, [16384], (16, 64, 256), configs)
    cases.prefill(bench, QWEN3_0_6B, [4000] * 8, (16, 64), configs)
    for batch, queries, context in ((1, 512, 8192), (32, 64, 1024), (1, 8, 4096)):
        cases.chunk_behind_history(bench, QWEN3_0_6B, batch, queries, context, configs[:4])


SECTIONS: Sections = {
    "gemv": (section_gemv, 90),
    "skinny": (section_skinny, 90),
    "decode": (section_decode, 90),
    "prefill": (section_prefill, 90),
}

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS, Path("tune_kernels.json"))
