"""Time a layer's four matrix products for 4 to 256 tokens: few_tokens_matmul in many shapes, skinny_matmul, cuBLAS.

    python benchmarks/products_gpu.py [--out FILE] [--sections m32,m64] [--processes 14] [--compile-limit 60]

The norm, SwiGLU and the residual are part of every time. All layers' products of one kind run in one graph, so that
weights come from memory; a time in the table at the end is microseconds per product, the graph's launch (8) included.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_harness import EPS, QWEN3_0_6B, QWEN3_8B, TOY, Bench, Model, Sections, Weights, main, make_layers, randn
from kernel_cases import label, linear_cases, plain_linear
from torch import Tensor

from nanoinfer.kernels import skinny_matmul
from nanoinfer.kernels.common import HOPPER_SHARED_MEMORY, INTERPRETED
from nanoinfer.kernels.few_tokens_matmul import TileConfig, few_tokens_matmul
from nanoinfer.kernels.streamed_matmul import StreamConfig, shared_bytes
from nanoinfer.kernels.triton_set import TritonKernels

RESULTS = Path(__file__).parent / "results" / "products_h200.json"
QWEN3_8B_TP2 = Model("qwen3-8b-tp2", 4096, 16, 4, 128, 6144, 6, 151936)
CASES = ("qkv", "o", "gate_up", "down")
Config = TileConfig | StreamConfig


def wide_configs(tokens: int) -> list[Config]:
    """For weights with thousands of rows of 1024."""
    if tokens <= 16:
        return [
            *(StreamConfig(64, columns, 256, 1, 4, 4) for columns in (16, 32)),
            *(StreamConfig(64, columns, 128, 1, 4, 8) for columns in (16, 32)),
            StreamConfig(64, 16, 128, 2, 4, 4),
        ]
    if tokens == 32:
        return [
            *(StreamConfig(64, 32, 128, 1, 4, stages) for stages in (4, 8)),
            *(StreamConfig(64, 32, 128, 1, 8, stages) for stages in (4, 8)),
            StreamConfig(64, 32, 256, 1, 4, 4),
            StreamConfig(64, 32, 256, 1, 8, 4),
            StreamConfig(64, 32, 128, 2, 4, 4),
            StreamConfig(64, 32, 256, 2, 4, 2),
            StreamConfig(128, 32, 128, 2, 8, 4),
            StreamConfig(64, 32, 128, 4, 4, 2),
            TileConfig(64, 32, 128, 1, 4, 3),
            TileConfig(64, 32, 128, 1, 4, 4),
            TileConfig(64, 32, 128, 1, 4, 4, prefetch=False),
            TileConfig(64, 32, 64, 1, 4, 6),
            TileConfig(64, 32, 256, 1, 8, 3),
            TileConfig(64, 32, 128, 2, 4, 4),
            TileConfig(32, 32, 128, 1, 4, 4),
            TileConfig(32, 32, 256, 1, 4, 3),
        ]
    if tokens == 64:
        return [
            *(StreamConfig(64, 64, 128, 1, warps, 4) for warps in (4, 8)),
            StreamConfig(64, 64, 128, 2, 4, 2),
            StreamConfig(64, 64, 128, 2, 4, 4),
            StreamConfig(64, 32, 128, 1, 4, 4),
            TileConfig(64, 64, 64, 1, 4, 5),
            TileConfig(64, 64, 128, 1, 4, 3),
            TileConfig(64, 64, 128, 1, 4, 4),
            TileConfig(64, 32, 128, 1, 4, 4),
            TileConfig(64, 64, 128, 2, 4, 3),
            TileConfig(128, 64, 64, 1, 8, 4),
        ]
    if tokens == 128:
        return [
            StreamConfig(64, 64, 128, 1, 4, 4),
            StreamConfig(64, 128, 64, 1, 4, 4),
            StreamConfig(64, 128, 64, 2, 4, 4),
            TileConfig(64, 64, 64, 1, 4, 5),
            TileConfig(64, 64, 128, 1, 4, 3),
            TileConfig(64, 128, 64, 1, 4, 4),
            TileConfig(64, 128, 128, 1, 4, 3),
            TileConfig(128, 64, 64, 1, 4, 4),
            TileConfig(128, 128, 64, 1, 8, 4),
            TileConfig(128, 128, 64, 2, 8, 4),
        ]
    return [
        TileConfig(64, 64, 64, 1, 4, 4),
        TileConfig(64, 128, 64, 1, 4, 4),
        TileConfig(64, 128, 128, 1, 4, 3),
        TileConfig(64, 256, 64, 1, 8, 4),
        TileConfig(128, 64, 64, 1, 4, 4),
        TileConfig(128, 128, 64, 1, 8, 3),
        TileConfig(128, 128, 64, 1, 8, 4),
        TileConfig(128, 128, 64, 1, 8, 4, prefetch=False),
        TileConfig(128, 256, 64, 1, 8, 3),
    ]


def narrow_configs(tokens: int, splits: tuple[int, int, int]) -> list[Config]:
    """For a weight with a thousand rows; splits: few, some and many."""
    few, some, many = splits
    if tokens <= 16:
        return [
            *(StreamConfig(64, columns, 128, few, 4, 8) for columns in (16, 32)),
            *(StreamConfig(64, 16, 128, some, 4, stages) for stages in (2, 4)),
        ]
    if tokens == 32:
        return [
            StreamConfig(64, 32, 128, few, 4, 8),
            StreamConfig(64, 32, 128, some, 4, 2),
            StreamConfig(64, 32, 128, some, 4, 4),
            StreamConfig(64, 32, 128, some, 8, 4),
            StreamConfig(64, 32, 256, some, 4, 2),
            StreamConfig(64, 32, 64, many, 4, 4),
            StreamConfig(64, 32, 128, many, 4, 3),
            StreamConfig(64, 32, 128, many, 8, 3),
            StreamConfig(128, 32, 128, many, 8, 3),
            TileConfig(64, 32, 128, few, 4, 4),
            TileConfig(64, 32, 128, some, 4, 3),
            TileConfig(64, 32, 128, some, 4, 4),
            TileConfig(64, 32, 64, some, 4, 6),
            TileConfig(64, 32, 128, many, 4, 3),
            TileConfig(64, 32, 128, many, 4, 3, prefetch=False),
            TileConfig(32, 32, 128, few, 4, 4),
            TileConfig(32, 32, 128, some, 4, 4),
            TileConfig(16, 32, 128, 1, 4, 4),
            TileConfig(16, 32, 256, 1, 4, 4),
            TileConfig(16, 32, 256, 2, 4, 3),
        ]
    if tokens == 64:
        return [
            StreamConfig(64, 64, 128, some, 4, 4),
            StreamConfig(64, 64, 128, some, 8, 4),
            StreamConfig(64, 64, 128, many, 4, 3),
            StreamConfig(64, 32, 128, some, 4, 4),
            TileConfig(64, 64, 128, few, 4, 4),
            TileConfig(64, 64, 128, some, 4, 4),
            TileConfig(64, 64, 128, many, 4, 3),
            TileConfig(64, 32, 128, some, 4, 4),
            TileConfig(32, 64, 128, few, 4, 4),
            TileConfig(32, 64, 128, some, 4, 3),
        ]
    if tokens == 128:
        return [
            StreamConfig(64, 64, 128, some, 4, 4),
            StreamConfig(64, 128, 64, many, 4, 4),
            TileConfig(64, 64, 128, few, 4, 4),
            TileConfig(64, 64, 64, some, 4, 5),
            TileConfig(64, 64, 128, some, 4, 3),
            TileConfig(64, 128, 64, some, 4, 4),
            TileConfig(64, 128, 64, many, 4, 4),
            TileConfig(32, 64, 128, few, 4, 3),
        ]
    return [
        TileConfig(64, 64, 64, 1, 4, 5),
        TileConfig(64, 64, 128, 1, 4, 4),
        TileConfig(64, 64, 128, few, 4, 3),
        TileConfig(64, 64, 64, few, 4, 5),
        TileConfig(64, 128, 64, few, 4, 4),
        TileConfig(64, 128, 64, some, 4, 4),
        TileConfig(128, 64, 64, some, 4, 4),
        TileConfig(128, 128, 64, some, 8, 4),
    ]


def long_configs(rows: int) -> list[Config]:
    """For 32 tokens and rows of several thousand elements."""
    splits = (2, 4) if rows < 8192 else (1, 2)
    return [
        StreamConfig(64, 32, 128, 8, 4, 4),
        *(TileConfig(64, 32, 128, count, 4, stages) for count in splits for stages in (4, 6)),
        *(TileConfig(64, 32, 128, count, 4, 4, prefetch=False) for count in splits),
        *(TileConfig(64, 32, 256, count, 4, 3, prefetch=False) for count in splits),
        *(TileConfig(128, 32, 128, count, 8, 3, prefetch=False) for count in splits),
        TileConfig(128, 32, 64, splits[1], 4, 5),
    ]


def configs(bench: Bench, model: Model, tokens: int, case: str, weight: Tensor) -> list[Config]:
    rows, width = weight.shape
    if bench.tiny:
        listed: list[Config] = [TileConfig(16, 16, 32, 1, 2, 2), TileConfig(32, 32, 32, 2, 4, 1)]
        listed += (
            []
            if INTERPRETED
            else [
                StreamConfig(64, 32, 32, 1, 4, 1),
                StreamConfig(64, 32, 32, 2, 8, 1),
            ]
        )
    elif model in (QWEN3_8B_TP2, QWEN3_8B):
        listed = long_configs(rows)
    elif case in ("qkv", "gate_up"):
        listed = wide_configs(tokens)
    else:
        listed = narrow_configs(tokens, (2, 4, 8) if case == "o" else (3, 6, 8))
    fitting = []
    for config in listed:
        if isinstance(config, StreamConfig):
            even = width % (config.splits * config.width) == 0
            if not even or shared_bytes(config, width) > HOPPER_SHARED_MEMORY:
                continue
        fitting.append(config)
    return fitting


def form(config: Config) -> str:
    return f"{'stream' if isinstance(config, StreamConfig) else 'tile'} {label(config)}"


def present(kernels: TritonKernels, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """The product as the engine computes it now; a residual is overwritten where cuBLAS does it."""
    if "residual" in options:
        return kernels.linear_add(x, weight, None, options["residual"])
    multiply = kernels.norm_swiglu if options.get("swiglu") else kernels.norm_linear
    return multiply(x, options["norm_weight"], EPS, weight, None)


class CublasKernels(TritonKernels):
    """cuBLAS for every product."""

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return residual.addmm_(x, weight.t())

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.rms_norm(x, norm_weight, eps) @ weight.T

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.silu_mul(self.norm_linear(x, norm_weight, eps, weight, bias))


def products(bench: Bench, section: str, model: Model, tokens: int) -> None:
    layers = make_layers(bench, model)
    for case, pick in linear_cases(model).items():
        x = randn(bench, tokens, pick(layers[0])[0].shape[1])
        residual, scratch = (randn(bench, tokens, model.hidden) for _ in range(2))
        calls = []
        for layer in layers:
            weight, options = pick(layer)
            calls.append((weight, options | ({"residual": residual} if "residual" in options else {})))
        expected = plain_linear(x, *calls[-1])
        facts = {"chain": len(calls)}

        def cublas(x: Tensor = x, calls: Any = calls, scratch: Tensor = scratch) -> Tensor:
            kernels = CublasKernels()
            for weight, options in calls:
                own = options | (
                    {"residual": scratch.zero_()} if "residual" in options and weight is calls[0][0] else {}
                )
                own |= {"residual": scratch} if "residual" in options else {}
                out = present(kernels, x, weight, own)
            return out

        bench.variant(f"{section}/{case}/cublas", cublas, **facts)
        if tokens <= skinny_matmul.MAX_TOKENS and skinny_matmul.fits(tokens, calls[0][0], swiglu=case == "gate_up"):

            def skinny(x: Tensor = x, calls: Any = calls) -> Tensor:
                return [skinny_matmul.skinny_matmul(x, weight, **options) for weight, options in calls][-1]

            bench.variant(f"{section}/{case}/skinny", skinny, expected=expected, **facts)
        for config in configs(bench, model, tokens, case, calls[0][0]):

            def chain(config: Config = config, x: Tensor = x, calls: Any = calls) -> Tensor:
                return [few_tokens_matmul(x, weight, config=config, **options) for weight, options in calls][-1]

            bench.variant(f"{section}/{case}/{form(config)}", chain, expected=expected, config=config, **facts)


def best(bench: Bench, section: str, case: str) -> Config | None:
    """The fastest config of ours for this product; None if another kernel is faster or nothing was timed."""
    return bench.results.get(bench.best(f"{section}/{case}/"), {}).get("config")


def layers_step(
    layers: list[Weights], model: Model, x: Tensor, product: Callable[[str, Tensor, Tensor, dict[str, Any]], Tensor]
) -> Tensor:
    """All products of a decode step; a slice of qkv stands for attention."""
    x = x.clone()
    picks = linear_cases(model)
    for layer in layers:
        qkv = product("qkv", x, *picks["qkv"](layer))
        x = product("o", qkv[:, : model.heads * model.head_dim], layer.o, {"residual": x})
        x = product("down", product("gate_up", x, *picks["gate_up"](layer)), layer.down, {"residual": x})
    return x


def step(bench: Bench, section: str, model: Model, tokens: int) -> None:
    layers = make_layers(bench, model)
    x = randn(bench, tokens, model.hidden)
    kernels = TritonKernels()

    def now() -> Tensor:
        return layers_step(layers, model, x, lambda case, x, w, options: present(kernels, x, w, options))

    bench.variant(f"step/{section}/present", now, chain=1)
    chosen = {case: best(bench, section, case) for case in CASES}
    forced = {case: fastest_of_ours(bench, section, case) for case in CASES}
    expected = now()
    for kind, mixture in {"best": chosen, "best-of-ours": forced}.items():

        def mixed(mixture: dict[str, Config | None] = mixture) -> Tensor:
            def product(name: str, x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
                config = mixture[name]
                if config is None:
                    return present(kernels, x, weight, options)
                return few_tokens_matmul(x, weight, config=config, **options)

            return layers_step(layers, model, x, product)

        facts = {case: form(config) for case, config in mixture.items() if config}
        bench.variant(f"step/{section}/{kind}", mixed, expected=expected, tolerance=0.2, chain=1, **facts)


def fastest_of_ours(bench: Bench, section: str, case: str) -> Config | None:
    prefix = f"{section}/{case}/"
    ours = {k: r["us"] for k, r in bench.results.items() if k.startswith(prefix) and "config" in r and "us" in r}
    return bench.results[min(ours, key=ours.__getitem__)]["config"] if ours else None


MEASURED: dict[str, tuple[Model, int]] = {
    "m4": (QWEN3_0_6B, 4),
    "m8": (QWEN3_0_6B, 8),
    "m16": (QWEN3_0_6B, 16),
    "m32": (QWEN3_0_6B, 32),
    "m64": (QWEN3_0_6B, 64),
    "m128": (QWEN3_0_6B, 128),
    "m256": (QWEN3_0_6B, 256),
    "m32_8b_tp2": (QWEN3_8B_TP2, 32),
    "m32_8b": (QWEN3_8B, 32),
}


def section_products(name: str) -> Callable[[Bench], None]:
    model, tokens = MEASURED[name]
    return lambda bench: products(bench, name, TOY if bench.tiny else model, 17 if bench.tiny else tokens)


def section_step(bench: Bench) -> None:
    if bench.share is not None:  # every kernel of it is in another section
        return
    for name in MEASURED:
        if any(key.startswith(f"{name}/") for key in bench.results):
            model, tokens = (TOY, 17) if bench.tiny else MEASURED[name]
            step(bench, name, model, tokens)


def section_table(bench: Bench) -> None:
    """The best of each product, short enough for the end of a log."""
    if bench.share is not None:
        return
    failed: dict[str, list[str]] = {}
    for key, record in bench.results.items():
        if "error" in record:
            failed.setdefault(record["error"][:120], []).append(key)
    for error, keys in list(failed.items())[:5]:
        print(f"{len(keys)} failed, {keys[0]}: {error}")
    moving = [key for key, record in bench.results.items() if "graph_differs" in record and "cublas" not in key]
    print(f"moving results: {moving[:5]}")
    for section in MEASURED:
        for case in CASES:
            timed = [
                (record["us"] / record["chain"], key.rsplit("/", 1)[1])
                for key, record in bench.results.items()
                if key.startswith(f"{section}/{case}/") and "us" in record
            ]
            timed.sort()
            names = [name for _, name in timed]
            rest = [timed[names.index(name)] for name in ("cublas", "skinny") if name in names[5:]]
            for kind in ("stream", "tile"):
                rest += next(([pair] for pair in timed if pair[1].startswith(kind) and pair not in timed[:5]), [])
            shown = "; ".join(f"{name} {us:.2f}" for us, name in timed[:5] + rest)
            if shown:
                print(f"{section} {case}: {shown}")
    for key, record in bench.results.items():
        if key.startswith("step/") and "us" in record:
            print(f"{key} {record['us']:.0f} us")


SECTIONS: Sections = {
    "m4": (section_products("m4"), 8),
    "m8": (section_products("m8"), 8),
    "m16": (section_products("m16"), 8),
    "m32": (section_products("m32"), 25),
    "m64": (section_products("m64"), 12),
    "m128": (section_products("m128"), 12),
    "m256": (section_products("m256"), 12),
    "m32_8b_tp2": (section_products("m32_8b_tp2"), 10),
    "m32_8b": (section_products("m32_8b"), 15),
    "step": (section_step, 12),
    "table": (section_table, 5),
}

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS, RESULTS)
