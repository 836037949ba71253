"""Time all products of layers: one after the other, at once by the persistent kernel (up to 64 tokens), in halves.

    python benchmarks/layers_gpu.py [--out FILE] [--sections 0.6b,8b]

A time in the table at the end is microseconds per layer, norms, SwiGLU and residuals included; a slice of each layer's
QKV stands for attention. Weights of all layers together do not fit into L2.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_harness import EPS, QWEN3_0_6B, QWEN3_8B, TOY, Bench, Model, Sections, main, make_layers, randn
from torch import Tensor

from nanoinfer.kernels import products_in_parts
from nanoinfer.kernels.common import INTERPRETED, is_hopper
from nanoinfer.kernels.layer_cuts import layer_cuts
from nanoinfer.kernels.layer_products import LayerProducts
from nanoinfer.kernels.persistent_layer import persistent_layer
from nanoinfer.kernels.triton_set import TritonKernels

RESULTS = Path(__file__).parent / "results" / "layers_h200.json"
MODELS = {
    "0.6b": QWEN3_0_6B,
    "1.7b": Model("qwen3-1.7b", 2048, 16, 8, 128, 6144, 14, 151936),
    "4b": Model("qwen3-4b", 2560, 32, 8, 128, 9728, 10, 151936),
    "llama-8b": Model("llama-3.1-8b", 4096, 32, 8, 128, 14336, 6, 128256),
    "8b": QWEN3_8B,
    "14b": Model("qwen3-14b", 5120, 40, 8, 128, 17408, 4, 151936),
}
TOKENS = (2, 8, 16, 32, 48, 64, 128, 192, 224, 256)
MOST_AT_ONCE = 64


def one_by_one(attended: Tensor, hidden: Tensor, products: LayerProducts) -> tuple[Tensor, Tensor]:
    """As the engine does it where the persistent kernel does not pay; the hidden state is overwritten."""
    kernels = TritonKernels()
    hidden = kernels.linear_add(attended, products.o, None, hidden)
    inner = kernels.norm_swiglu(hidden, products.norm, EPS, products.gate_up, None)
    hidden = kernels.linear_add(inner, products.down, None, hidden)
    return hidden, kernels.norm_linear(hidden, products.next_norm, EPS, products.next_qkv, None)


def layers(bench: Bench, model: Model) -> None:
    weights = make_layers(bench, model)
    chain = [
        LayerProducts(w.o, w.norm, w.gate_up, w.down, following.norm, following.qkv, None, EPS)
        for w, following in zip(weights, [*weights[1:], weights[0]], strict=True)
    ]
    width = model.heads * model.head_dim
    cores = torch.cuda.get_device_properties(bench.device).multi_processor_count if bench.device.type == "cuda" else 1
    cuts = layer_cuts(model.hidden, width, model.inner, model.qkv, cores)
    for tokens in TOKENS:
        x, attended = randn(bench, tokens, model.hidden), randn(bench, tokens, width)

        def run(
            step: Callable[[Tensor, Tensor, LayerProducts], tuple[Tensor, Tensor]],
            x: Tensor = x,
            attended: Tensor = attended,
        ) -> Tensor:
            hidden = x.clone()
            for products in chain:
                hidden, qkv = step(attended, hidden, products)
                attended = qkv[:, :width]
            return hidden

        facts: dict[str, Any] = {"tokens": tokens, "chain": len(chain)}
        bench.variant(f"{model.name}/{tokens}/one-by-one", lambda run=run: run(one_by_one), **facts)
        facts["expected"], facts["tolerance"] = run(one_by_one), 0.05
        if tokens > MOST_AT_ONCE:
            bench.variant(
                f"{model.name}/{tokens}/in-halves",
                lambda run=run: run(products_in_parts.between_attentions),
                **facts,
            )
        elif cuts is not None and is_hopper(bench.device) and not INTERPRETED:

            def at_once(*tensors: Tensor | LayerProducts) -> tuple[Tensor, Tensor]:
                return persistent_layer(*tensors, cuts)

            bench.variant(f"{model.name}/{tokens}/at-once", lambda run=run: run(at_once), **facts)


def section_table(bench: Bench) -> None:
    if bench.share is not None:
        return
    for key, record in bench.results.items():
        others = (bench.results.get(key.replace("one-by-one", name), {}) for name in ("at-once", "in-halves"))
        before, now = record, next((other for other in others if other), {})
        if key.endswith("/one-by-one") and "us" in before and "us" in now:
            times = [entry["us"] / entry["chain"] for entry in (before, now)]
            print(
                f"{key[: -len('/one-by-one')]}: {times[0]:.1f} -> {times[1]:.1f} us a layer ({times[0] / times[1]:.2f})"
            )


def section(name: str) -> Callable[[Bench], None]:
    return lambda bench: layers(bench, TOY if bench.tiny else MODELS[name])


SECTIONS: Sections = {**{name: (section(name), 40) for name in MODELS}, "table": (section_table, 5)}

if __name__ == "__main__":
    main(__doc__ or "", SECTIONS, RESULTS)
