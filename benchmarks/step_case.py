"""A whole decode step made of the kernels, in one CUDA graph: ours, ours beside cuBLAS, and cuBLAS alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_harness import EPS, Bench, DecodeLayers, Model, Weights, make_layers, randn
from torch import Tensor
from triton.runtime.jit import JITFunction

from nanoinfer.kernels import (
    activation,
    decode_attention,
    decode_splits,
    few_decodes_attention,
    gemv,
    norm,
    sampling,
    skinny_matmul,
)


class StepChain:
    """A whole decode step's kernels, from the first norm to the sampled token, in several forms."""

    def __init__(self, bench: Bench, model: Model, batch: int, context: int, block_size: int) -> None:
        self.layers = make_layers(bench, model)
        self.head = randn(bench, model.vocab, model.hidden, scale=model.hidden**-0.5)
        self.final_norm = randn(bench, model.hidden)
        self.model = model
        self.data = DecodeLayers(bench, model, batch, context, block_size, model.layers)
        self.workspace = decode_attention.DecodeWorkspace.for_batches(
            batch, model.heads, model.kv_heads, model.head_dim, bench.device
        )
        self.x = randn(bench, batch, model.hidden)
        rows = self.data.starts[:-1].long()
        self.race = (torch.full((batch,), 0.6, device=bench.device), rows, rows)

    def attend(self, qkv: Tensor, w: Weights, cache: tuple[Tensor, Tensor]) -> Tensor:
        data, model = self.data, self.model
        small = decode_splits.is_small(len(qkv), model.kv_heads, qkv.device)
        attend = few_decodes_attention.few_decodes_attention if small else decode_attention.fused_decode_attention
        return attend(
            qkv, w.head_norm, w.head_norm, EPS, data.cos_sin, *cache, data.slots, data.tables, data.lengths,
            model.head_dim**-0.5, model.heads, self.workspace,
        ).flatten(1)  # fmt: skip

    def fused(self, linear: Callable[..., Tensor]) -> Tensor:
        """Norm, SwiGLU and residual belong to the products -> the last hidden state."""
        x = self.x
        for w, cache in zip(self.layers, self.data.caches, strict=True):
            qkv = linear(x, w.qkv, norm_weight=w.norm, eps=EPS)
            x = linear(self.attend(qkv, w, cache), w.o, residual=x)
            inner = linear(x, w.gate_up, norm_weight=w.norm, eps=EPS, swiglu=True)
            x = linear(inner, w.down, residual=x)
        sampling.head_best(x, self.head, *self.race, norm_weight=self.final_norm, eps=EPS)
        return x

    def mixed(self) -> Tensor:
        """cuBLAS for the large products, ours for those back to the hidden width."""
        x, linear = self.x, skinny_matmul.skinny_matmul
        for w, cache in zip(self.layers, self.data.caches, strict=True):
            qkv = F.linear(norm.rms_norm(x, w.norm, EPS), w.qkv)
            x = linear(self.attend(qkv, w, cache), w.o, residual=x)
            inner = activation.silu_mul(F.linear(norm.rms_norm(x, w.norm, EPS), w.gate_up))
            x = linear(inner, w.down, residual=x)
        sampling.head_best(x, self.head, *self.race, norm_weight=self.final_norm, eps=EPS)
        return x

    def cublas(self) -> Tensor:
        """cuBLAS for every product."""
        residual = self.x
        x = norm.rms_norm(residual, self.layers[0].norm, EPS)
        followers = [*self.layers[1:], self.layers[0]]
        for w, following, cache in zip(self.layers, followers, self.data.caches, strict=True):
            x = F.linear(self.attend(F.linear(x, w.qkv), w, cache), w.o)
            x, residual = norm.sum_rms_norm(x[None], residual, w.norm, EPS)
            x = F.linear(activation.silu_mul(F.linear(x, w.gate_up)), w.down)
            x, residual = norm.sum_rms_norm(x[None], residual, following.norm, EPS)
        sampling.head_best(residual, self.head, *self.race, norm_weight=self.final_norm, eps=EPS)
        return residual


def decode_step(bench: Bench, model: Model, batch: int, context: int, block_size: int = 16) -> None:
    chain = StepChain(bench, model, batch, context, block_size)
    key = f"step/{model.name}/b{batch}/c{context}/bs{block_size}"
    checked: dict[str, Any] = {"expected": chain.cublas(), "tolerance": 0.2}
    if batch == 1:
        bench.variant(f"{key}/gemv", lambda: chain.fused(gemv.gemv), **checked)
        modules = (gemv, few_decodes_attention, sampling)
        chosen = [module.pdl_options for module in modules]
        for module in modules:
            module.pdl_options = lambda x: {"PDL": False}
        bench.variant(f"{key}/gemv-without-pdl", lambda: chain.fused(gemv.gemv), **checked)
        for module, options in zip(modules, chosen, strict=True):
            module.pdl_options = options
    if batch <= skinny_matmul.MAX_TOKENS:
        bench.variant(f"{key}/skinny", lambda: chain.fused(skinny_matmul.skinny_matmul), **checked)
        bench.variant(f"{key}/mixed", chain.mixed, **checked)
    bench.variant(f"{key}/cublas", chain.cublas)


def decode_step_with_one_carveout(bench: Bench, model: Model, batch: int, context: int) -> None:
    """The gemv step with all kernels asking for the same split of L1 and shared memory.

    A core changes that split only while it is idle, so kernels with different ones cannot overlap on it. Last of all
    cases, since the request stays with the kernels.
    """
    chain = StepChain(bench, model, batch, context, 16)
    run, asked = JITFunction.run, set()
    driver = ctypes.CDLL("libcuda.so.1")
    carveout, all_shared = 9, 100  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent

    def run_and_ask(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **kwargs)
        if kernel.function not in asked:
            asked.add(kernel.function)
            status = driver.cuFuncSetAttribute(ctypes.c_void_p(kernel.function), carveout, all_shared)
            assert status == 0, status
        return kernel

    key = f"step/{model.name}/b{batch}/c{context}/bs16"
    expected = chain.cublas()
    bench.variant(f"{key}/gemv-again", lambda: chain.fused(gemv.gemv), expected=expected, tolerance=0.2)
    JITFunction.run = run_and_ask
    try:
        bench.variant(f"{key}/gemv-one-carveout", lambda: chain.fused(gemv.gemv), expected=expected, tolerance=0.2)
    finally:
        JITFunction.run = run
