"""Time the Triton kernels with the launch configurations they choose, beside cuBLAS, cuDNN and torch, on the GPU.

    python benchmarks/kernels_gpu.py [--out FILE] [--sections step,decode] [--processes 12]

Each result is checked against the torch twin in the same run. Every time includes one graph launch of about 8 us.
"""

from __future__ import annotations

from pathlib import Path

import kernel_cases as cases
import step_case
import torch
from gpu_harness import QWEN3_0_6B, QWEN3_8B, TOY, Bench, Sections, main

from nanoinfer.kernels import gemv, skinny_matmul

RESULTS = Path(__file__).parent / "results" / "kernels_h200.json"


def section_ceilings(bench: Bench) -> None:
    if not bench.tiny:
        source = torch.empty(2**30, dtype=torch.float32, device=bench.device).normal_()
        bench.variant("copy 4 GiB", lambda: source.clone(), gigabytes=8.59)


def section_elementwise(bench: Bench) -> None:
    for tokens in (3,) if bench.tiny else (1, 256, 16384):
        cases.elementwise(bench, TOY if bench.tiny else QWEN3_0_6B, tokens)


def section_sampling(bench: Bench) -> None:
    for batch in (1, 3) if bench.tiny else (1, 32, 256):
        cases.sampling_from_logits(bench, TOY if bench.tiny else QWEN3_0_6B, batch)


def section_decode(bench: Bench) -> None:
    if bench.tiny:
        cases.decode(bench, TOY, 3, 40, 16, [None])
        return
    for batch, context in ((1, 128), (1, 1024), (1, 8192), (4, 1024), (16, 1024), (32, 384), (64, 1024), (256, 1024)):
        cases.decode(bench, QWEN3_0_6B, batch, context, 16, [None])
    for block_size in (64, 256):
        cases.decode(bench, QWEN3_0_6B, 256, 1024, block_size, [None])
    cases.decode(bench, QWEN3_8B, 128, 1024, 16, [None])


def section_prefill(bench: Bench) -> None:
    if bench.tiny:
        cases.prefill(bench, TOY, [20, 70], (16,), [None])
        cases.chunk_behind_history(bench, TOY, 2, 5, 40, [None])
        return
    cases.prefill(bench, QWEN3_0_6B, [16384], (16, 64, 256), [None])
    cases.prefill(bench, QWEN3_0_6B, [4000] * 8, (16, 64, 256), [None])
    cases.prefill(bench, QWEN3_8B, [8192], (16, 64), [None])
    for batch, queries, context in ((1, 512, 8192), (32, 64, 1024), (1, 8, 4096)):
        cases.chunk_behind_history(bench, QWEN3_0_6B, batch, queries, context, [None])
    cases.vendor_attention(bench, QWEN3_0_6B, 16384)


def section_linear(bench: Bench) -> None:
    if bench.tiny:
        cases.linear_chain(bench, TOY, 1, gemv.gemv, "gemv", [None])
        cases.linear_chain(bench, TOY, 5, skinny_matmul.skinny_matmul, "skinny", [None])
        return
    for model in (QWEN3_0_6B, QWEN3_8B):
        cases.linear_chain(bench, model, 1, gemv.gemv, "gemv", [None])
        for tokens in (1, 4, 16, 32, 64):
            cases.cublas_chain(bench, model, tokens)
    for tokens in (2, 4, 8, 16, 32):
        cases.linear_chain(bench, QWEN3_0_6B, tokens, skinny_matmul.skinny_matmul, "skinny", [None])


def section_step(bench: Bench) -> None:
    for batch in (1, 2) if bench.tiny else (1, 2, 4, 8, 16, 32, 64):
        step_case.decode_step(bench, TOY if bench.tiny else QWEN3_0_6B, batch, 40 if bench.tiny else 384)
    if not bench.tiny:
        step_case.decode_step(bench, QWEN3_0_6B, 256, 1024)
        step_case.decode_step_with_one_carveout(bench, QWEN3_0_6B, 1, 384)


SECTIONS: Sections = {
    "ceilings": (section_ceilings, 20),
    "elementwise": (section_elementwise, 30),
    "sampling": (section_sampling, 60),
    "decode": (section_decode, 60),
    "prefill": (section_prefill, 60),
    "linear": (section_linear, 60),
    "step": (section_step, 60),
}

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS, RESULTS)
