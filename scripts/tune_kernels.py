"""Check, tune and time the Triton kernels on a GPU, section by section; results go to one JSON file with raw samples.

    python scripts/tune_kernels.py --out results.json [--sections gemv,decode] [--processes 12]

Every variant is compared with the torch twin before it is timed. Compilation is spread over processes first, which
share Triton's cache. Times are CUDA-graph replays between events. --tiny runs every section once at toy sizes without
timing, also in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from nanoinfer.kernels import (
    activation,
    common,
    decode_attention,
    gemv,
    keep_bounds,
    norm,
    prefill_attention,
    reference,
    rope,
    sampling,
    skinny_matmul,
)

BF16 = torch.bfloat16
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


QWEN3_0_6B = Model("qwen3-0.6b", 1024, 16, 8, 128, 3072, 28, 151936)
QWEN3_8B = Model("qwen3-8b", 4096, 32, 8, 128, 12288, 6, 151936)  # 6 of 36 layers are enough to leave the L2 cache
TOY = Model("toy", 64, 4, 2, 16, 96, 2, 500)


@dataclass
class Bench:
    """Runs variants: compiles its share of them (`share`), or checks and times all."""

    device: torch.device
    tiny: bool
    share: tuple[int, int] | None
    results: dict[str, Any] = field(default_factory=dict)
    seen: int = 0

    def variant(
        self,
        key: str,
        fn: Callable[[], Any],
        *,
        expected: Tensor | None = None,
        tolerance: float = 2e-2,
        **facts: Any,
    ) -> float:
        """Median microseconds of fn (inf if it failed or was wrong), recorded under key with its samples."""
        self.seen += 1
        if self.share is not None:
            if self.seen % self.share[1] == self.share[0]:
                with quiet():
                    fn()
            return 0.0
        try:
            record = self._measure(fn, expected, tolerance) | facts
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {str(error)[:300]}"} | facts
            if self.tiny:
                raise
        self.results[key] = record
        median = record.get("us", float("inf"))
        extra = {k: v for k, v in record.items() if k not in ("samples_us", "us")}
        print(f"{key:60s} {median:10.1f} us  {extra}", flush=True)
        return median

    def _measure(self, fn: Callable[[], Any], expected: Tensor | None, tolerance: float) -> dict[str, Any]:
        actual = fn()
        actual = actual[0] if isinstance(actual, tuple) else actual
        record: dict[str, Any] = {}
        if expected is not None:
            difference = (actual.double() - expected.double()).norm() / expected.double().norm()
            record["error_rel"] = float(f"{difference.item():.3g}")
            assert difference.item() < tolerance, f"wrong: relative error {difference.item()}"
        if self.tiny:
            return record
        samples, replayed = graph_times(fn)
        replayed = replayed[0] if isinstance(replayed, tuple) else replayed
        if not torch.equal(actual, replayed):  # a moving result is a race
            record["graph_differs"] = int((actual != replayed).sum())
        record["us"] = sorted(samples)[len(samples) // 2]
        record["samples_us"] = [round(sample, 2) for sample in samples]
        return record

    def best(self, prefix: str) -> str:
        timed = {k: v["us"] for k, v in self.results.items() if k.startswith(prefix) and "us" in v}
        return min(timed, key=timed.__getitem__) if timed else ""


@contextmanager
def quiet() -> Iterator[None]:
    try:
        yield
    except Exception:
        traceback.print_exc()


def graph_times(fn: Callable[[], Any], replays: int = 15) -> tuple[list[float], Any]:
    """Microseconds of each replay, and what the last one wrote."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) * 1e3 for start, stop in events]
    out = [part.clone() for part in out] if isinstance(out, tuple) else out.clone()
    return times, tuple(out) if isinstance(out, list) else out


def randn(bench: Bench, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(*shape, dtype=BF16, device=bench.device).normal_().mul_(scale)


@dataclass
class Weights:
    """One layer's matrices, and the norms around them."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    head_norm: Tensor


def make_layers(bench: Bench, model: Model) -> list[Weights]:
    def matrix(rows: int, columns: int) -> Tensor:
        return randn(bench, rows, columns, scale=columns**-0.5)

    return [
        Weights(
            qkv=matrix(model.qkv, model.hidden),
            o=matrix(model.hidden, model.heads * model.head_dim),
            gate_up=matrix(2 * model.inner, model.hidden),
            down=matrix(model.hidden, model.inner),
            norm=randn(bench, model.hidden),
            head_norm=randn(bench, model.head_dim),
        )
        for _ in range(model.layers)
    ]


def linear_cases(model: Model) -> dict[str, Callable[[Weights], tuple[Tensor, dict[str, Any]]]]:
    """How each of a layer's four products is called: its weight, and what is fused."""
    return {
        "qkv": lambda w: (w.qkv, {"norm_weight": w.norm, "eps": EPS}),
        "o": lambda w: (w.o, {"residual": True}),
        "gate_up": lambda w: (w.gate_up, {"norm_weight": w.norm, "eps": EPS, "swiglu": True}),
        "down": lambda w: (w.down, {"residual": True}),
    }


def plain_linear(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    if "norm_weight" in options:
        x = reference.rms_norm(x.float(), options["norm_weight"].float(), EPS)
    out = x.float() @ weight.float().T
    if options.get("swiglu"):
        out = reference.silu_mul(out)
    return (out + options["residual"].float()).to(BF16) if "residual" in options else out.to(BF16)


def tune_linear(bench: Bench, model: Model, tokens: int, kernel: Callable[..., Tensor], name: str, shapes: Any) -> None:
    layers = make_layers(bench, model)
    for case, pick in linear_cases(model).items():
        width = pick(layers[0])[0].shape[1]
        x = randn(bench, tokens, width)
        residual = randn(bench, tokens, model.hidden)
        calls = []
        for layer in layers:
            weight, options = pick(layer)
            calls.append((weight, options | ({"residual": residual} if "residual" in options else {})))
        expected = plain_linear(x, *calls[-1])
        megabytes = sum(weight.numel() for weight, _ in calls) * 2 / 1e6
        for shape in shapes:

            def chain(shape: Any = shape, x: Tensor = x, calls: Any = calls) -> Tensor:
                return [kernel(x, weight, shape=shape, **options) for weight, options in calls][-1]

            key = f"{name}/{model.name}/m{tokens}/{case}/{tuple(shape)}"
            bench.variant(key, chain, expected=expected, chain=len(calls), megabytes=megabytes)


def best_shapes(bench: Bench, name: str, model: Model, tokens: int, kind: Any) -> dict[str, Any]:
    """The fastest shape of each product in the results so far, None where nothing was timed."""
    shapes = {}
    for case in linear_cases(model):
        key = bench.best(f"{name}/{model.name}/m{tokens}/{case}/")
        shapes[case] = kind(*json.loads(key.rsplit("/", 1)[1].replace("(", "[").replace(")", "]"))) if key else None
    return shapes


def section_gemv(bench: Bench) -> None:
    if bench.tiny:
        tune_linear(bench, TOY, 1, gemv.gemv, "gemv", [gemv.GemvShape(2, 1), gemv.GemvShape(4, 2)])
        return
    shapes = ((2, 1), (2, 2), (2, 4), (2, 8), (4, 1), (4, 2), (4, 4), (4, 8), (8, 2), (8, 4), (8, 8))
    tune_linear(bench, QWEN3_0_6B, 1, gemv.gemv, "gemv", [gemv.GemvShape(*s) for s in shapes])
    shapes = ((1, 4), (1, 8), (2, 4), (2, 8), (4, 8))
    tune_linear(bench, QWEN3_8B, 1, gemv.gemv, "gemv", [gemv.GemvShape(*s) for s in shapes])


SKINNY_SHAPES = ((8, 4, 256), (16, 4, 256), (32, 4, 256), (8, 4, 128), (16, 4, 128), (8, 8, 128), (16, 8, 128), (32, 8, 128), (8, 8, 256), (16, 8, 256))  # fmt: skip


def section_skinny(bench: Bench) -> None:
    kernel = skinny_matmul.skinny_matmul
    if bench.tiny:
        tune_linear(bench, TOY, 5, kernel, "skinny", [skinny_matmul.SkinnyShape(8, 2, 32)])
        return
    shapes = [skinny_matmul.SkinnyShape(*s) for s in SKINNY_SHAPES]
    for tokens in (1, 4, 16, 32, 64):
        tune_linear(bench, QWEN3_0_6B, tokens, kernel, "skinny", shapes if tokens in (4, 32) else shapes[:8])
    tune_linear(bench, QWEN3_8B, 4, kernel, "skinny", [shapes[k] for k in (0, 5, 6, 8)])
    for model, tokens in itertools.product((QWEN3_0_6B, QWEN3_8B), (1, 4, 16, 32, 64)):
        layers = make_layers(bench, model)
        for case, pick in linear_cases(model).items():
            weights = [pick(layer)[0] for layer in layers]
            x = randn(bench, tokens, weights[0].shape[1])

            def cublas(x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
                return [F.linear(x, weight) for weight in weights][-1]

            bench.variant(f"cublas/{model.name}/m{tokens}/{case}/", cublas, chain=len(weights))


class DecodeLayers:
    """Paged caches of several layers, so that together they do not fit the L2 cache."""

    def __init__(self, bench: Bench, model: Model, batch: int, context: int, block_size: int, layers: int) -> None:
        blocks = -(-context // block_size)
        self.tables = torch.randperm(batch * blocks, device=bench.device).to(torch.int32).view(batch, blocks)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
        positions = self.lengths.long() - 1
        last = self.tables[torch.arange(batch, device=bench.device), positions // block_size].long()
        self.slots = last * block_size + positions % block_size
        shape = (batch * blocks, block_size, model.kv_heads, model.head_dim)
        self.caches = [(randn(bench, *shape), randn(bench, *shape)) for _ in range(layers)]
        angles = torch.rand(context, model.head_dim // 2, device=bench.device) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)


def tune_decode(
    bench: Bench, model: Model, batch: int, context: int, block_size: int, shapes: Any, chunks: tuple[int, ...] = (128,)
) -> None:
    per_layer = batch * context * model.kv_heads * model.head_dim * 4
    layers = max(1, min(28, -(-300_000_000 // per_layer))) if not bench.tiny else 1
    data = DecodeLayers(bench, model, batch, context, block_size, layers)
    scale = model.head_dim**-0.5
    q = randn(bench, batch, model.heads, model.head_dim)
    qkv = randn(bench, batch, model.qkv)
    head_norm = randn(bench, model.head_dim)
    some = slice(0, min(batch, 4))
    expected = reference.paged_attention(
        q[some], *data.caches[-1], data.tables[some], data.starts[: some.stop + 1], data.lengths[some], scale
    )
    workspace = decode_attention.DecodeWorkspace(
        batch * 64, batch, model.heads, model.kv_heads, model.head_dim, bench.device
    )
    for shape in shapes:

        def attend(shape: Any = shape) -> Tensor:
            for k, v in data.caches:
                out = decode_attention.decode_attention(
                    q, k, v, data.tables, data.lengths, scale, workspace, shape=shape
                )
            return out[some]

        facts = {"layers": layers, "megabytes": layers * per_layer / 1e6}
        key = f"{model.name}/b{batch}/c{context}/bs{block_size}/{tuple(shape)}"
        bench.variant(f"decode/{key}", attend, expected=expected, **facts)

    heads = reference.qk_norm_rope_store(
        qkv, head_norm, head_norm, EPS, data.cos_sin, data.lengths.long() - 1, *data.caches[-1], data.slots,
        model.heads, model.kv_heads, model.head_dim,
    )  # fmt: skip
    expected = reference.paged_attention(
        heads[0][some], *data.caches[-1], data.tables[some], data.starts[: some.stop + 1], data.lengths[some], scale
    )
    for shape, chunk, prefetch in itertools.product(shapes, chunks, (True, False)):

        def fused(shape: Any = shape, chunk: int = chunk, prefetch: bool = prefetch) -> Tensor:
            for k, v in data.caches:
                out = decode_attention.fused_decode_attention(
                    qkv, head_norm, head_norm, EPS, data.cos_sin, k, v, data.slots, data.tables, data.lengths, scale,
                    model.heads, workspace, shape=shape, min_chunk=chunk, prefetch=prefetch,
                )  # fmt: skip
            return out[some]

        bench.variant(
            f"decode-fused/{model.name}/b{batch}/c{context}/bs{block_size}/{tuple(shape)}/chunk{chunk}/prefetch{int(prefetch)}",
            fused,
            expected=expected,
            **facts,
        )


def decode_shapes(splits: tuple[int, ...], tiles: Any) -> list[decode_attention.DecodeShape]:
    return [decode_attention.DecodeShape(*tile, count) for tile in tiles for count in splits]


def section_decode(bench: Bench) -> None:
    if bench.tiny:
        tune_decode(bench, TOY, 3, 40, 16, decode_shapes((1, 2), ((32, 4, 2),)), (16, 32))
        return
    model = QWEN3_0_6B
    few = ((64, 4, 3), (64, 4, 4), (128, 4, 3), (64, 2, 4))
    for block_size in (16, 256):
        tune_decode(bench, model, 256, 1024, block_size, decode_shapes((1,), few))
    tune_decode(bench, model, 64, 1024, 16, decode_shapes((1, 2, 4), few[:2]), (128, 256))
    tune_decode(bench, model, 16, 1024, 16, decode_shapes((4, 8), few[:2]), (64, 128, 256))
    small = ((64, 4, 3), (128, 4, 2), (64, 8, 3), (32, 4, 3))
    for context in (128, 384, 1024):
        tune_decode(bench, model, 1, context, 16, decode_shapes((16,), small), (64, 128, 256, 512))
    tune_decode(bench, model, 1, 8192, 16, decode_shapes((16, 33, 64), small[:2]), (128, 256))
    tune_decode(bench, model, 1, 384, 256, decode_shapes((16,), small[:1]), (128,))
    tune_decode(bench, QWEN3_8B, 128, 1024, 16, decode_shapes((1,), few))


def causal_tera(model: Model, lengths: list[int]) -> float:
    return sum(2 * n * n * model.head_dim * model.heads for n in lengths) / 1e12


def tune_prefill(bench: Bench, model: Model, lengths: list[int], block_sizes: tuple[int, ...], shapes: Any) -> None:
    tokens, scale = sum(lengths), model.head_dim**-0.5
    rows = randn(bench, tokens, model.heads + 2 * model.kv_heads, model.head_dim)
    q = randn(bench, tokens, model.heads, model.head_dim)
    k = randn(bench, tokens, model.kv_heads, model.head_dim)
    v = rows[:, model.heads + model.kv_heads :]
    starts = torch.tensor([0, *lengths], device=bench.device).cumsum(0).to(torch.int32)
    lengths_device = torch.tensor(lengths, dtype=torch.int32, device=bench.device)
    begin = int(starts[-2])
    probe = slice(begin + lengths[-1] // 3, begin + lengths[-1] // 3 + 64)
    expected = reference.causal_attention(q[probe], k[begin : probe.stop], v[begin : probe.stop], scale)
    tera = causal_tera(model, lengths)
    name = f"prefill/{model.name}/{len(lengths)}x{lengths[0]}"
    for shape in shapes:

        def direct(shape: Any = shape) -> Tensor:
            return prefill_attention.prefill_attention(q, k, v, starts, max(lengths), scale, shape=shape)[probe]

        tflops(bench, f"{name}/direct/{tuple(shape)}", direct, expected, tera)
    for block_size in block_sizes:
        counts = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(counts), device=bench.device).to(torch.int32)
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device=bench.device)
        slots, taken = [], 0
        for i, count in enumerate(counts):
            tables[i, :count] = order[taken : taken + count]
            taken += count
            position = torch.arange(lengths[i], device=bench.device)
            slots.append(tables[i, position // block_size].long() * block_size + position % block_size)
        shape4 = (sum(counts), block_size, model.kv_heads, model.head_dim)
        k_cache = torch.full(shape4, float("nan"), dtype=BF16, device=bench.device)
        v_cache = torch.full(shape4, float("nan"), dtype=BF16, device=bench.device)
        reference.store_kv(k, v, k_cache, v_cache, torch.cat(slots))
        for shape in shapes:

            def paged(
                shape: Any = shape, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache, tables: Tensor = tables
            ) -> Tensor:
                return prefill_attention.paged_prefill_attention(
                    q, k_cache, v_cache, tables, starts, lengths_device, max(lengths), scale, shape=shape
                )[probe]

            tflops(bench, f"{name}/bs{block_size}/{tuple(shape)}", paged, expected, tera)


def tflops(bench: Bench, key: str, fn: Callable[[], Tensor], expected: Tensor | None, tera: float) -> None:
    median = bench.variant(key, fn, expected=expected)
    if key in bench.results and median > 0:
        bench.results[key]["tflops"] = round(tera / median * 1e6, 1)
        print(f"    {bench.results[key]['tflops']} TFLOP/s", flush=True)


PREFILL_SHAPES = ((128, 64, 8, 3, True), (64, 64, 4, 3, True), (128, 128, 8, 2, True), (128, 64, 8, 4, True), (128, 64, 8, 3, False), (64, 64, 4, 3, False))  # fmt: skip


def tune_chunk(bench: Bench, model: Model, batch: int, queries: int, context: int, shapes: Any) -> None:
    """Chunks behind a longer history."""
    data = DecodeLayers(bench, model, batch, context, 16, 1)
    q = randn(bench, batch * queries, model.heads, model.head_dim)
    scale = model.head_dim**-0.5
    starts = data.starts * queries
    expected = reference.paged_attention(
        q[:queries], *data.caches[0], data.tables[:1], starts[:2], data.lengths[:1], scale
    )
    for shape in shapes:

        def chunk(shape: Any = shape) -> Tensor:
            return prefill_attention.paged_prefill_attention(
                q, *data.caches[0], data.tables, starts, data.lengths, queries, scale, shape=shape
            )[:queries]

        bench.variant(f"chunk/{model.name}/b{batch}/q{queries}/c{context}/{tuple(shape)}", chunk, expected=expected)


def section_prefill(bench: Bench) -> None:
    if bench.tiny:
        tune_prefill(bench, TOY, [20, 70], (16,), [prefill_attention.PrefillShape(32, 32, 4, 2)])
        tune_chunk(bench, TOY, 2, 5, 40, [prefill_attention.PrefillShape(32, 32, 4, 2)])
        return
    shapes = [prefill_attention.PrefillShape(*shape) for shape in PREFILL_SHAPES]
    tune_prefill(bench, QWEN3_0_6B, [16384], (16, 64, 256), shapes)
    tune_prefill(bench, QWEN3_0_6B, [4000] * 8, (16, 64), shapes)
    tune_prefill(bench, QWEN3_0_6B, [128], (16,), shapes)
    tune_prefill(bench, QWEN3_8B, [8192], (16, 64), shapes[:3])
    short = [prefill_attention.PrefillShape(*s) for s in ((32, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3), (16, 64, 4, 3))]
    for batch, queries, context in ((1, 512, 8192), (32, 64, 1024), (1, 8, 4096)):
        tune_chunk(bench, QWEN3_0_6B, batch, queries, context, short)
    model, length = QWEN3_0_6B, 16384
    q, k, v = (randn(bench, 1, heads, length, model.head_dim) for heads in (model.heads, model.kv_heads, model.kv_heads))
    backends = torch.nn.attention.SDPBackend
    for backend in (backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION):
        with torch.nn.attention.sdpa_kernel(backend):
            tflops(
                bench,
                f"sdpa/{backend.name}/1x{length}",
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                None,
                causal_tera(model, [length]),
            )


def section_elementwise(bench: Bench) -> None:
    model = TOY if bench.tiny else QWEN3_0_6B
    for tokens in (3,) if bench.tiny else (1, 256, 16384):
        x, residual = randn(bench, tokens, model.hidden), randn(bench, tokens, model.hidden)
        weight, head_norm = randn(bench, model.hidden), randn(bench, model.head_dim)
        gate_up, qkv = randn(bench, tokens, 2 * model.inner), randn(bench, tokens, model.qkv)
        positions = torch.arange(tokens, device=bench.device)
        angles = torch.rand(tokens, model.head_dim // 2, device=bench.device) * 6
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        blocks = -(-tokens // 16)
        caches = [randn(bench, blocks, 16, model.kv_heads, model.head_dim) for _ in "kv"]
        heads = (model.heads, model.kv_heads, model.head_dim)
        store = (qkv, head_norm, head_norm, EPS, cos_sin, positions, *caches, positions, *heads)
        bench.variant(
            f"rms_norm/t{tokens}", lambda: norm.rms_norm(x, weight, EPS), expected=reference.rms_norm(x, weight, EPS)
        )
        bench.variant(
            f"add_rms_norm/t{tokens}",
            lambda: norm.add_rms_norm(x, residual, weight, EPS),
            expected=reference.add_rms_norm(x, residual, weight, EPS)[0],
        )
        bench.variant(
            f"silu_mul/t{tokens}", lambda: activation.silu_mul(gate_up), expected=reference.silu_mul(gate_up)
        )
        bench.variant(
            f"qk_norm_rope_store/t{tokens}",
            lambda: rope.qk_norm_rope_store(*store),
            expected=reference.qk_norm_rope_store(*store)[0],
        )


def section_sampling(bench: Bench) -> None:
    model = TOY if bench.tiny else QWEN3_0_6B
    head = randn(bench, model.vocab, model.hidden, scale=model.hidden**-0.5)
    norm_weight = randn(bench, model.hidden)
    for batch in (1, 3) if bench.tiny else (1, 2, 4, 64, 256):
        hidden = randn(bench, batch, model.hidden)
        temperatures = torch.full((batch,), 0.6, device=bench.device)
        seeds = torch.arange(batch, device=bench.device)
        race = (temperatures, seeds, seeds)
        logits = 3 * (hidden @ head.T)
        twin = reference.sample(logits.float(), *race)
        same = (sampling.sample(logits, *race)[0] == twin).float().mean().item()
        bench.variant(f"sample/b{batch}", lambda: sampling.sample(logits, *race), agree=same)
        if batch == 1:
            norms = {"norm_weight": norm_weight, "eps": EPS, "out_dtype": torch.float32}
            exact = reference.rms_norm(hidden.float(), norm_weight.float(), EPS) @ head.float().T
            for shape in ((2, 4), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8)):
                bench.variant(
                    f"lm_head/b1/{shape}",
                    lambda: gemv.gemv(hidden, head, shape=gemv.GemvShape(*shape), **norms),
                    expected=exact,
                )
        bench.variant(f"lm_head_cublas/b{batch}", lambda: hidden @ head.T)
        for chunk in (1024, 2048, 4096, 8192):
            sampling.CHUNK = chunk
            bench.variant(f"sample/b{batch}/chunk{chunk}", lambda: sampling.sample(logits, *race))
        sampling.CHUNK = 4096
        for name, k, p in (("top_k", 50, 1.0), ("top_p", 0, 0.9), ("both", 50, 0.95)):
            top_k = torch.full((batch,), k, device=bench.device)
            top_p = torch.full((batch,), p, device=bench.device)
            filters = (temperatures, top_k, top_p, torch.zeros(batch, device=bench.device))
            some = slice(0, min(batch, 4))
            expected = reference.mask_unlikely(logits[some].float(), *(f[some] for f in filters)).isfinite()
            for block, warps in ((8192, 16), (16384, 16), (16384, 32), (32768, 16), (32768, 32)):
                keep_bounds.BLOCK, keep_bounds.NUM_WARPS = block, warps
                thresholds, cutoffs = keep_bounds.keep_bounds(logits, *filters)
                ids = torch.arange(model.vocab, device=bench.device)
                wide, least = logits[some].float(), thresholds[some, None]
                actual = (wide > least) | ((wide == least) & (ids <= cutoffs[some, None]))
                differ = int((actual != expected).sum())
                key = f"keep_bounds/b{batch}/{name}/{block}x{warps}"
                bench.variant(key, lambda: keep_bounds.keep_bounds(logits, *filters), differ=differ)


def section_step(bench: Bench) -> None:
    """A whole decode step's kernels in one graph, from the first norm to the sampled token."""
    model = TOY if bench.tiny else QWEN3_0_6B
    layers = make_layers(bench, model)
    head = randn(bench, model.vocab, model.hidden, scale=model.hidden**-0.5)
    scale, eps, final_norm = model.head_dim**-0.5, {"eps": EPS}, layers[0].norm
    for batch, context in ((1, 40), (2, 40)) if bench.tiny else ((1, 384), (2, 384), (4, 384), (8, 384), (16, 384), (32, 384), (64, 384)):
        data = DecodeLayers(bench, model, batch, context, 16, model.layers)
        workspace = decode_attention.DecodeWorkspace.for_batches(
            batch, model.heads, model.kv_heads, model.head_dim, bench.device
        )
        x0 = randn(bench, batch, model.hidden)
        race = (torch.full((batch,), 0.6, device=bench.device), data.starts[:-1].long(), data.starts[:-1].long())

        def attend(qkv: Tensor, w: Weights, cache: Any) -> Tensor:
            return decode_attention.fused_decode_attention(
                qkv, w.head_norm, w.head_norm, EPS, data.cos_sin, *cache, data.slots, data.tables, data.lengths,
                scale, model.heads, workspace,
            ).flatten(1)  # fmt: skip

        def fused_step(linear: Any, shapes: dict[str, Any], head_dtype: torch.dtype) -> Tensor:
            x = x0
            for w, cache in zip(layers, data.caches, strict=True):
                qkv = linear(x, w.qkv, shape=shapes["qkv"], norm_weight=w.norm, **eps)
                x = linear(attend(qkv, w, cache), w.o, shape=shapes["o"], residual=x)
                inner = linear(x, w.gate_up, shape=shapes["gate_up"], norm_weight=w.norm, swiglu=True, **eps)
                x = linear(inner, w.down, shape=shapes["down"], residual=x)
            logits = linear(x, head, norm_weight=final_norm, out_dtype=head_dtype, **eps)
            sampling.sample(logits, *race)
            return logits

        def normed_step(shapes: dict[str, Any]) -> Tensor:
            """Norms as kernels of their own, all else as in fused_step."""
            x, linear = x0, skinny_matmul.skinny_matmul
            for w, cache in zip(layers, data.caches, strict=True):
                qkv = linear(norm.rms_norm(x, w.norm, EPS), w.qkv, shape=shapes["qkv"])
                x = linear(attend(qkv, w, cache), w.o, shape=shapes["o"], residual=x)
                inner = linear(norm.rms_norm(x, w.norm, EPS), w.gate_up, shape=shapes["gate_up"], swiglu=True)
                x = linear(inner, w.down, shape=shapes["down"], residual=x)
            logits = linear(norm.rms_norm(x, final_norm, EPS), head)
            sampling.sample(logits, *race)
            return logits

        def library_step() -> Tensor:
            """cuBLAS for every product."""
            residual = x0
            x = norm.rms_norm(residual, layers[0].norm, EPS)
            for w, following, cache in zip(layers, [*layers[1:], layers[0]], data.caches, strict=True):
                x = F.linear(attend(F.linear(x, w.qkv), w, cache), w.o)
                x, residual = norm.add_rms_norm(x, residual, w.norm, EPS)
                x = F.linear(activation.silu_mul(F.linear(x, w.gate_up)), w.down)
                x, residual = norm.add_rms_norm(x, residual, following.norm, EPS)
            logits = F.linear(x, head)
            sampling.sample(logits, *race)
            return logits

        key = f"step/{model.name}/b{batch}/c{context}"
        checked = {"expected": library_step(), "tolerance": 0.2}
        if batch == 1:
            shapes = best_shapes(bench, "gemv", model, 1, gemv.GemvShape)

            def step() -> Tensor:
                return fused_step(gemv.gemv, shapes, torch.float32)

            bench.variant(f"{key}/gemv", step, shapes=str(shapes), **checked)
            for module in (gemv, decode_attention, sampling):
                module.pdl_options = lambda x: {"PDL": False}
            bench.variant(f"{key}/gemv-without-pdl", step, **checked)
            for module in (gemv, decode_attention, sampling):
                module.pdl_options = common.pdl_options
        near = min((1, 4, 16, 32, 64), key=lambda tokens: abs(tokens - batch))
        skinny = best_shapes(bench, "skinny", model, near, skinny_matmul.SkinnyShape)
        bench.variant(
            f"{key}/skinny", lambda: fused_step(skinny_matmul.skinny_matmul, skinny, BF16), shapes=str(skinny), **checked
        )
        bench.variant(f"{key}/skinny-norm-apart", lambda: normed_step(skinny), **checked)
        bench.variant(f"{key}/cublas", library_step)


def section_facts(bench: Bench) -> None:
    if bench.tiny:
        return
    a = torch.empty(2**30, dtype=torch.float32, device=bench.device).normal_()
    bench.variant("copy 4 GiB", lambda: a.clone(), gigabytes=8.59)
    x, y = randn(bench, 8192, 8192), randn(bench, 8192, 8192)
    tflops(bench, "matmul 8192", lambda: x @ y, None, 2 * 8192**3 / 1e12)


SECTIONS: dict[str, tuple[Callable[[Bench], None], int]] = {  # name -> (function, limit in seconds)
    "facts": (section_facts, 20),
    "elementwise": (section_elementwise, 30),
    "sampling": (section_sampling, 60),
    "decode": (section_decode, 90),
    "prefill": (section_prefill, 90),
    "gemv": (section_gemv, 60),
    "skinny": (section_skinny, 90),
    "step": (section_step, 90),
}


class OutOfTimeError(BaseException):
    """Not an Exception, so that a variant's own error handling lets it pass."""


def run_sections(bench: Bench, names: list[str], save: Callable[[], None]) -> None:
    def out_of_time(*_: Any) -> None:
        raise OutOfTimeError("the section's time is over")

    signal.signal(signal.SIGALRM, out_of_time)
    for name in names:
        section, limit = SECTIONS[name]
        began = time.perf_counter()
        signal.alarm(0 if bench.tiny or bench.share else limit)
        try:
            torch.manual_seed(0)
            section(bench)
        except (Exception, OutOfTimeError):
            traceback.print_exc()
            if bench.tiny:
                raise
        finally:
            signal.alarm(0)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        if bench.share is None:
            print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
            save()


def machine_facts() -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "device": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": properties.L2_cache_size / 2**20,
            "cuda": torch.version.cuda,
            "cpus": os.cpu_count(),
        }
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("kernels.json"))
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--processes", type=int, default=0, help="compile variants in this many processes first")
    parser.add_argument("--compile-limit", type=float, default=150.0, help="seconds for those processes")
    parser.add_argument("--share", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    names = arguments.sections.split(",")
    share = tuple(int(part) for part in arguments.share.split("/")) if arguments.share else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, arguments.tiny, share)  # type: ignore[arg-type]

    def save() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine_facts(), "results": bench.results}, indent=1))

    if arguments.processes:
        began = time.perf_counter()
        command = [sys.executable, __file__, "--sections", arguments.sections]
        workers = [
            subprocess.Popen([*command, "--share", f"{i}/{arguments.processes}"]) for i in range(arguments.processes)
        ]
        for worker in workers:
            try:
                worker.wait(max(1.0, began + arguments.compile_limit - time.perf_counter()))
            except subprocess.TimeoutExpired:
                worker.kill()
        print(f"-- compiled in {time.perf_counter() - began:.1f} s", flush=True)
    run_sections(bench, names, save)


if __name__ == "__main__":
    main()
