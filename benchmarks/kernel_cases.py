"""The cases of the GPU kernel benchmarks, each for a list of launch configurations; None is what the kernel chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_harness import BF16, EPS, Bench, DecodeLayers, Model, Weights, make_layers, randn
from torch import Tensor

from nanoinfer.kernels import (
    activation,
    decode_attention,
    decode_splits,
    few_decodes_attention,
    keep_bounds,
    norm,
    prefill_attention,
    reference,
    rope,
    sampling,
)


def label(config: Any) -> str:
    return "chosen" if config is None else "x".join(str(int(part)) for part in config)


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


def linear_chain(
    bench: Bench, model: Model, tokens: int, kernel: Callable[..., Tensor], name: str, configs: Iterable[Any]
) -> None:
    """All layers' products of one kind in one graph, so that weights come from memory and launches overlap."""
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
        for config in configs:

            def chain(config: Any = config, x: Tensor = x, calls: Any = calls) -> Tensor:
                return [kernel(x, weight, config=config, **options) for weight, options in calls][-1]

            key = f"{name}/{model.name}/m{tokens}/{case}/{label(config)}"
            bench.variant(key, chain, expected=expected, chain=len(calls), megabytes=megabytes)


def cublas_chain(bench: Bench, model: Model, tokens: int) -> None:
    layers = make_layers(bench, model)
    for case, pick in linear_cases(model).items():
        weights = [pick(layer)[0] for layer in layers]
        x = randn(bench, tokens, weights[0].shape[1])

        def chain(x: Tensor = x, weights: list[Tensor] = weights) -> Tensor:
            return [F.linear(x, weight) for weight in weights][-1]

        bench.variant(f"cublas/{model.name}/m{tokens}/{case}", chain, chain=len(weights))


def decode(
    bench: Bench,
    model: Model,
    batch: int,
    context: int,
    block_size: int,
    configs: Iterable[Any],
) -> None:
    """Plain and fused decode attention over several layers' caches."""
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
    name = f"{model.name}/b{batch}/c{context}/bs{block_size}"
    facts = {"layers": layers, "megabytes": layers * per_layer / 1e6}
    for config in configs:

        def attend(config: Any = config) -> Tensor:
            for k, v in data.caches:
                out = decode_attention.decode_attention(
                    q, k, v, data.tables, data.lengths, scale, workspace, config=config
                )
            return out[some]

        bench.variant(f"decode/{name}/{label(config)}", attend, expected=expected, **facts)

    heads = reference.qk_norm_rope_store(
        qkv, head_norm, head_norm, EPS, data.cos_sin, data.lengths.long() - 1, *data.caches[-1], data.slots,
        model.heads, model.kv_heads, model.head_dim,
    )  # fmt: skip
    expected = reference.paged_attention(
        heads[0][some], *data.caches[-1], data.tables[some], data.starts[: some.stop + 1], data.lengths[some], scale
    )
    small = decode_splits.is_small(batch, model.kv_heads, bench.device)
    attend_fused = few_decodes_attention.few_decodes_attention if small else decode_attention.fused_decode_attention
    for config in configs:

        def fused(config: Any = config) -> Tensor:
            for k, v in data.caches:
                out = attend_fused(
                    qkv, head_norm, head_norm, EPS, data.cos_sin, k, v, data.slots, data.tables, data.lengths, scale,
                    model.heads, workspace, config=config,
                )  # fmt: skip
            return out[some]

        bench.variant(f"decode-fused/{name}/{label(config)}", fused, expected=expected, **facts)


def causal_tera(model: Model, lengths: list[int]) -> float:
    return sum(2 * n * n * model.head_dim * model.heads for n in lengths) / 1e12


def prefill(
    bench: Bench, model: Model, lengths: list[int], block_sizes: tuple[int, ...], configs: Iterable[Any]
) -> None:
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
    for config in configs:

        def direct(config: Any = config) -> Tensor:
            return prefill_attention.prefill_attention(q, k, v, starts, max(lengths), scale, config=config)[probe]

        tflops(bench, f"{name}/direct/{label(config)}", direct, expected, tera)
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
        for config in configs:

            def paged(
                config: Any = config, k_cache: Tensor = k_cache, v_cache: Tensor = v_cache, tables: Tensor = tables
            ) -> Tensor:
                return prefill_attention.paged_prefill_attention(
                    q, k_cache, v_cache, tables, starts, lengths_device, max(lengths), scale, config=config
                )[probe]

            tflops(bench, f"{name}/bs{block_size}/{label(config)}", paged, expected, tera)


def tflops(bench: Bench, key: str, fn: Callable[[], Tensor], expected: Tensor | None, tera: float) -> None:
    median = bench.variant(key, fn, expected=expected)
    if key in bench.results and median > 0:
        bench.results[key]["tflops"] = round(tera / median * 1e6, 1)
        print(f"    {bench.results[key]['tflops']} TFLOP/s", flush=True)


def chunk_behind_history(
    bench: Bench, model: Model, batch: int, queries: int, context: int, configs: Iterable[Any]
) -> None:
    """Chunks behind a longer history."""
    data = DecodeLayers(bench, model, batch, context, 16, 1)
    q = randn(bench, batch * queries, model.heads, model.head_dim)
    scale = model.head_dim**-0.5
    starts = data.starts * queries
    expected = reference.paged_attention(
        q[:queries], *data.caches[0], data.tables[:1], starts[:2], data.lengths[:1], scale
    )
    for config in configs:

        def chunk(config: Any = config) -> Tensor:
            return prefill_attention.paged_prefill_attention(
                q, *data.caches[0], data.tables, starts, data.lengths, queries, scale, config=config
            )[:queries]

        bench.variant(f"chunk/{model.name}/b{batch}/q{queries}/c{context}/{label(config)}", chunk, expected=expected)


def vendor_attention(bench: Bench, model: Model, length: int) -> None:
    """torch's own attention on one contiguous sequence, for comparison."""
    q, k, v = (randn(bench, 1, n, length, model.head_dim) for n in (model.heads, model.kv_heads, model.kv_heads))
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION"):
        with torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, name)):
            tflops(
                bench,
                f"sdpa/{name}/1x{length}",
                lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                None,
                causal_tera(model, [length]),
            )


def elementwise(bench: Bench, model: Model, tokens: int) -> None:
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
        f"sum_rms_norm/t{tokens}",
        lambda: norm.sum_rms_norm(x[None], residual, weight, EPS),
        expected=reference.sum_rms_norm(x[None], residual, weight, EPS)[0],
    )
    bench.variant(f"silu_mul/t{tokens}", lambda: activation.silu_mul(gate_up), expected=reference.silu_mul(gate_up))
    bench.variant(
        f"qk_norm_rope_store/t{tokens}",
        lambda: rope.qk_norm_rope_store(*store),
        expected=reference.qk_norm_rope_store(*store)[0],
    )


def sampling_from_logits(bench: Bench, model: Model, batch: int) -> None:
    head = randn(bench, model.vocab, model.hidden, scale=model.hidden**-0.5)
    norm_weight = randn(bench, model.hidden)
    hidden = randn(bench, batch, model.hidden)
    temperatures = torch.full((batch,), 0.6, device=bench.device)
    seeds = torch.arange(batch, device=bench.device)
    race = (temperatures, seeds, seeds)
    logits = 3 * (hidden @ head.T)
    agree = (sampling.best(logits, *race)[0] == reference.sample(logits.float(), *race)).float().mean().item()
    bench.variant(f"best/b{batch}", lambda: sampling.best(logits, *race), agree=agree)
    bench.variant(f"twin/b{batch}", lambda: reference.sample(logits.float(), *race))
    bench.variant(
        f"head_best/b{batch}",
        lambda: sampling.head_best(hidden, head, *race, norm_weight=norm_weight, eps=EPS),
    )
    for name, k, p in (("top_k", 50, 1.0), ("top_p", 0, 0.9), ("both", 50, 0.95)):
        filters = (
            temperatures,
            torch.full((batch,), k, device=bench.device),
            torch.full((batch,), p, device=bench.device),
            torch.zeros(batch, device=bench.device),
        )
        some = slice(0, min(batch, 4))
        expected = reference.mask_unlikely(logits[some].float(), *(part[some] for part in filters)).isfinite()
        thresholds, cutoffs = keep_bounds.keep_bounds(logits, *filters)
        ids = torch.arange(model.vocab, device=bench.device)
        wide, least = logits[some].float(), thresholds[some, None]
        kept = (wide > least) | ((wide == least) & (ids <= cutoffs[some, None]))
        bench.variant(
            f"keep_bounds/b{batch}/{name}",
            lambda filters=filters: keep_bounds.keep_bounds(logits, *filters),
            differ=int((kept != expected).sum()),
        )
    bench.variant(f"sort/b{batch}", lambda: logits.sort(dim=-1, descending=True))
