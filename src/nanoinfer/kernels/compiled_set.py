"""CompiledKernels: the plain torch forms under torch.compile, for devices without hand-written kernels.

Only free functions of `reference` are compiled, each once for one token and once for any number of them: all layers
share a function's graph, and nothing about a model or a layer can force a recompilation.
"""

from __future__ import annotations

import os
import shutil

import torch
from torch import Tensor

from nanoinfer.kernels import reference
from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import KernelSet


def why_not(device: torch.device) -> str | None:
    """Why torch.compile cannot be used on `device`, or None if it can."""
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        return "torch.compile needs a C++ compiler here, and there is no g++"
    return None


class CompiledKernels(KernelSet):
    """The elementwise operations, each fused by torch.compile; products stay those of the libraries."""

    name = "compiled"

    def __init__(self) -> None:
        self._rms_norm = torch.compile(reference.rms_norm, dynamic=True)
        self._silu_mul = torch.compile(reference.silu_mul, dynamic=True)
        self._qk_norm_rope = torch.compile(reference.qk_norm_rope, dynamic=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._rms_norm(x, weight, eps)
        return normed

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self._silu_mul(gate_up)
        return product

    def qk_norm_rope_store(
        self, qkv: Tensor, heads: HeadLayout, norm: QKNorm, cos_sin: Tensor, slots: TokenSlots, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._qk_norm_rope(
            qkv, norm.q_weight, norm.k_weight, norm.eps, cos_sin, slots.positions, *heads.counts
        )
        # How many slots are real is known to the device alone, which a compiled graph cannot ask.
        reference.store_kv(k, v, *cache, slots.slot_mapping)
        return q, k, v
