"""Check, tune and time the Triton kernels on a GPU, section by section; results go to one JSON file with raw samples.

    python scripts/tune_kernels.py --out results.json [--sections gemv,decode] [--processes 12]

Every variant is compared with the torch twin before it is timed. Compilation is spread over processes first, which
share Triton's cache. Times are CUDA-graph replays between events. --tiny runs every section once at toy sizes without
timing, also in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import functools
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

    def variant(self, key: str, fn: Callable[[], Any], *, expected: Tensor | None = None, **facts: Any) -> float:
        """Median microseconds of fn (inf if it failed or was wrong), recorded under key with its samples."""
        self.seen += 1
        if self.share is not None:
            if self.seen % self.share[1] == self.share[0]:
                with quiet():
                    fn()
            return 0.0
        try:
            record = self._measure(fn, expected) | facts
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {str(error)[:300]}"} | facts
            if self.tiny:
                raise
        self.results[key] = record
        median = record.get("us", float("inf"))
        extra = {k: v for k, v in record.items() if k not in ("samples_us", "us")}
        print(f"{key:60s} {median:10.1f} us  {extra}", flush=True)
        return median

    def _measure(self, fn: Callable[[], Any], expected: Tensor | None) -> dict[str, Any]:
        actual = fn()
        record: dict[str, Any] = {}
        if expected is not None:
            actual = actual[0] if isinstance(actual, tuple) else actual
            difference = (actual.double() - expected.double()).norm() / expected.double().norm()
            record["error_rel"] = float(f"{difference.item():.3g}")
            assert difference.item() < 2e-2, f"wrong: relative error {difference.item()}"
        if self.tiny:
            return record
        samples = graph_times(fn)
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


def graph_times(fn: Callable[[], Any], replays: int = 15) -> list[float]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e3 for start, stop in events]


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
    model = TOY if bench.tiny else QWEN3_0_6B
    shapes = [gemv.GemvShape(rows, warps) for rows in (1, 2, 4, 8) for warps in (1, 2, 4, 8) if rows * 2 >= warps // 2]
    tune_linear(bench, model, 1, gemv.gemv, "gemv", shapes[:2] if bench.tiny else shapes)


def section_gemv_more(bench: Bench) -> None:
    small = [gemv.GemvShape(*s) for s in ((1, 4), (2, 4), (2, 8), (4, 4), (4, 8))]
    if bench.tiny:
        tune_linear(bench, TOY, 3, gemv.gemv, "gemv", small[:1])
        return
    tune_linear(bench, QWEN3_8B, 1, gemv.gemv, "gemv", [gemv.GemvShape(*s) for s in ((1, 4), (1, 8), (2, 4), (2, 8), (4, 8))])
    for tokens in (2, 4):
        tune_linear(bench, QWEN3_0_6B, tokens, gemv.gemv, "gemv", small)


def section_skinny(bench: Bench) -> None:
    shapes = [
        skinny_matmul.SkinnyShape(*s)
        for s in ((16, 128, 4, 4), (16, 256, 4, 3), (16, 512, 4, 2), (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (16, 256, 2, 3), (16, 256, 8, 4))
    ]  # fmt: skip
    if bench.tiny:
        tune_linear(bench, TOY, 5, skinny_matmul.skinny_matmul, "skinny", [skinny_matmul.SkinnyShape(16, 32, 4, 2)])
        return
    for tokens in (16, 32):
        tune_linear(bench, QWEN3_0_6B, tokens, skinny_matmul.skinny_matmul, "skinny", shapes)
    tune_linear(bench, QWEN3_0_6B, 4, skinny_matmul.skinny_matmul, "skinny", shapes[:5])
    without = functools.partial(skinny_matmul.skinny_matmul, prefetch_own=False)
    tune_linear(bench, QWEN3_0_6B, 16, without, "skinny-without-prefetch", shapes[:5])
    tune_linear(bench, QWEN3_8B, 16, skinny_matmul.skinny_matmul, "skinny", shapes[3:6])
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


def tune_decode(bench: Bench, model: Model, batch: int, context: int, block_size: int, shapes: Any) -> None:
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

    def fused(shape: Any = shapes[0]) -> Tensor:
        for k, v in data.caches:
            out = decode_attention.fused_decode_attention(
                qkv, head_norm, head_norm, EPS, data.cos_sin, k, v, data.slots, data.tables, data.lengths, scale,
                model.heads, workspace, shape=shape,
            )  # fmt: skip
        return out

    heads = reference.qk_norm_rope_store(
        qkv, head_norm, head_norm, EPS, data.cos_sin, data.lengths.long() - 1, *data.caches[-1], data.slots,
        model.heads, model.kv_heads, model.head_dim,
    )  # fmt: skip
    expected = reference.paged_attention(
        heads[0][some], *data.caches[-1], data.tables[some], data.starts[: some.stop + 1], data.lengths[some], scale
    )
    bench.variant(
        f"decode-fused/{model.name}/b{batch}/c{context}/bs{block_size}/{tuple(shapes[0])}",
        lambda: fused()[some],
        expected=expected,
        **facts,
    )


def decode_shapes(splits: tuple[int, ...], tiles: Any) -> list[decode_attention.DecodeShape]:
    return [decode_attention.DecodeShape(*tile, count) for tile in tiles for count in splits]


TILES = ((64, 4, 3), (64, 4, 4), (64, 4, 5), (32, 4, 4), (32, 4, 5), (128, 4, 3), (128, 8, 3), (64, 2, 4), (64, 8, 4), (32, 2, 5), (64, 4, 2))  # fmt: skip
FEW_TILES = ((64, 4, 4), (32, 4, 5), (128, 4, 3), (64, 4, 2))


def section_decode(bench: Bench) -> None:
    if bench.tiny:
        tune_decode(bench, TOY, 3, 40, 16, decode_shapes((1, 2), ((32, 4, 2),)))
        return
    tune_decode(bench, QWEN3_0_6B, 256, 1024, 16, decode_shapes((1,), TILES) + decode_shapes((2,), FEW_TILES[:1]))
    tune_decode(bench, QWEN3_0_6B, 64, 1024, 16, decode_shapes((2, 4), FEW_TILES))
    tune_decode(bench, QWEN3_0_6B, 1, 1024, 16, decode_shapes((8, 16, 33), FEW_TILES[:2]))
    tune_decode(bench, QWEN3_0_6B, 1, 256, 16, decode_shapes((4, 16), FEW_TILES[:2]))
    for block_size in (64, 256):
        tune_decode(bench, QWEN3_0_6B, 256, 1024, block_size, decode_shapes((1,), FEW_TILES))
        tune_decode(bench, QWEN3_0_6B, 1, 1024, block_size, decode_shapes((16,), FEW_TILES[:1]))
    tune_decode(bench, QWEN3_8B, 128, 1024, 16, decode_shapes((1,), FEW_TILES))


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
    probe = slice(starts[-2].item() + lengths[-1] // 3, starts[-2].item() + lengths[-1] // 3 + 64)
    begin = starts[-2].item()
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
        for shape in shapes[:4]:

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


PREFILL_SHAPES = ((128, 64, 8, 3, True), (128, 64, 8, 2, True), (64, 64, 4, 2, True), (128, 128, 8, 2, True), (64, 128, 4, 2, True), (64, 64, 4, 3, True), (64, 32, 4, 3, True), (128, 32, 8, 4, True), (128, 64, 8, 3, False), (128, 128, 8, 1, True))  # fmt: skip


def section_prefill(bench: Bench) -> None:
    if bench.tiny:
        tune_prefill(bench, TOY, [20, 70], (16,), [prefill_attention.PrefillShape(32, 32, 4, 2)])
        return
    shapes = [prefill_attention.PrefillShape(*shape) for shape in PREFILL_SHAPES]
    tune_prefill(bench, QWEN3_0_6B, [16384], (16, 64, 256), shapes)
    tune_prefill(bench, QWEN3_0_6B, [4000] * 8, (64,), shapes[:4])
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
        if batch <= 4:
            for shape in ((4, 4), (8, 4), (8, 8), (16, 8), (32, 8), (2, 4)):
                bench.variant(
                    f"lm_head_sample/b{batch}/{shape}",
                    lambda: sampling.lm_head_sample(
                        hidden, head, *race, norm_weight=norm_weight, eps=EPS, shape=gemv.GemvShape(*shape)
                    ),
                )
        else:
            bench.variant(f"lm_head_cublas_sample/b{batch}", lambda: sampling.sample(hidden @ head.T, *race))
        for name, k, p in (("top_k", 50, 1.0), ("top_p", 0, 0.9), ("both", 50, 0.95)):
            top_k = torch.full((batch,), k, device=bench.device)
            top_p = torch.full((batch,), p, device=bench.device)
            filters = (temperatures, top_k, top_p, torch.zeros(batch, device=bench.device))
            some = slice(0, min(batch, 4))
            expected = reference.mask_unlikely(logits[some].float(), *(f[some] for f in filters)).isfinite()
            thresholds, cutoffs = keep_bounds.keep_bounds(logits, *filters)
            ids = torch.arange(model.vocab, device=bench.device)
            wide, least = logits[some].float(), thresholds[some, None]
            actual = (wide > least) | ((wide == least) & (ids <= cutoffs[some, None]))
            differ = int((actual != expected).sum())
            bench.variant(
                f"keep_bounds/b{batch}/{name}", lambda: keep_bounds.keep_bounds(logits, *filters), differ=differ
            )


def section_step(bench: Bench) -> None:
    """A whole decode step's kernels in one graph, from the first norm to the sampled token."""
    model = TOY if bench.tiny else QWEN3_0_6B
    layers = make_layers(bench, model)
    head = randn(bench, model.vocab, model.hidden, scale=model.hidden**-0.5)
    scale = model.head_dim**-0.5
    shapes = best_shapes(bench, "gemv", model, 1, gemv.GemvShape)
    skinny = best_shapes(bench, "skinny", model, 16, skinny_matmul.SkinnyShape)
    for batch, context in ((2, 40),) if bench.tiny else ((1, 384), (2, 384), (4, 384), (16, 384), (32, 384)):
        data = DecodeLayers(bench, model, batch, context, 16, model.layers)
        workspace = decode_attention.DecodeWorkspace.for_batches(
            batch, model.heads, model.kv_heads, model.head_dim, bench.device
        )
        x0 = randn(bench, batch, model.hidden)
        race = (torch.full((batch,), 0.6, device=bench.device), data.starts[:-1].long(), data.starts[:-1].long())
        small = batch <= gemv.MAX_ROWS

        def linear(x: Tensor, weight: Tensor, case: str, following: Tensor | None, **options: Any) -> Tensor:
            if small:
                return gemv.gemv(x, weight, next_weight=following, shape=shapes[case], **options)
            return skinny_matmul.skinny_matmul(x, weight, next_weight=following, shape=skinny[case], **options)

        def step(prefetch: str) -> Tensor:
            x = x0
            ahead = prefetch != "none"
            for i, (w, (k, v)) in enumerate(zip(layers, data.caches, strict=True)):
                last = i + 1 == len(layers)
                qkv = linear(x, w.qkv, "qkv", w.o if prefetch == "all" else None, norm_weight=w.norm, eps=EPS)
                attended = decode_attention.fused_decode_attention(
                    qkv, w.head_norm, w.head_norm, EPS, data.cos_sin, k, v, data.slots, data.tables, data.lengths,
                    scale, model.heads, workspace, next_weight=w.o if prefetch == "attention" else w.gate_up if ahead else None,
                )  # fmt: skip
                following = w.down if prefetch == "all" else None
                x = linear(attended.flatten(1), w.o, "o", following, residual=x)
                following = layers[i + 1].qkv if prefetch == "all" and not last else None
                inner = linear(x, w.gate_up, "gate_up", following, norm_weight=w.norm, eps=EPS, swiglu=True)
                x = linear(inner, w.down, "down", None, residual=x)
            if small:
                return sampling.lm_head_sample(x, head, *race, norm_weight=layers[0].norm, eps=EPS)[0]
            return sampling.sample(norm.rms_norm(x, layers[0].norm, EPS) @ head.T, *race)[0]

        for prefetch in ("none", "attention", "attention2", "all"):
            bench.variant(f"step/{model.name}/b{batch}/c{context}/prefetch-{prefetch}", lambda p=prefetch: step(p))
        if batch == 1 and not bench.tiny:
            supports = common.supports_pdl
            common.supports_pdl = lambda device: False
            bench.variant(f"step/{model.name}/b{batch}/c{context}/no-pdl", lambda: step("none"))
            common.supports_pdl = supports


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
    "gemv_more": (section_gemv_more, 60),
    "skinny": (section_skinny, 90),
    "step": (section_step, 60),
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
