"""NumbaKernels: the CPU's kernel set with numba: own kernels for few tokens, torch's products for many."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.kernels.cpu_set import CpuKernels
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout, KVCache, QKNorm, TokenSlots

# Up to so many tokens our kernels are faster than what CpuKernels asks of torch (docs/decisions/022).
NUMBA_MOST_TOKENS = {torch.float32: 24, torch.bfloat16: 48}


def why_not(dtype: torch.dtype) -> str | None:
    """Why this set cannot be used, as far as that shows without importing numba; None if it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None if dtype in NUMBA_MOST_TOKENS else f"numba has no {str(dtype).removeprefix('torch.')} on a CPU"


class NumbaKernels(CpuKernels):
    """Activations are float32 whatever the weights are. float32 and bfloat16 weights.

    Until `compile` has ended, and for good if it failed, this is CpuKernels. `num_threads` programs share a kernel.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self._dtype = dtype
        self._most_tokens = 0
        self._kernels: Any = None
        self.num_threads = torch.get_num_threads()
        self._nothing = as_array(torch.empty(0, dtype=dtype))

    @property
    def paged_decode(self) -> Any:
        """`numba_kernels.paged_decode`, once it is compiled."""
        return self._kernels.paged_decode

    def compile(self) -> None:
        """Import numba and make all kernels ready: half a minute at the very first start, then read from a cache.

        Raises whatever numba does where it is broken, has no thread pool that is safe, or nowhere to keep its cache.
        May run in a thread; the one that steps calls `use_threads` afterwards.
        """
        import numba

        # The workqueue layer ends the process when two threads use it at once, and is slow; without OpenMP this raises.
        numba.config.THREADING_LAYER = "omp"
        from nanoinfer.kernels import numba_kernels

        self._kernels, self._most_tokens = numba_kernels, NUMBA_MOST_TOKENS[self._dtype]
        try:
            self._run_all()
        except BaseException:
            self._kernels, self._most_tokens = None, 0
            raise
        self.name = "numba"

    def _run_all(self) -> None:
        """Every kernel once with the types that steps use: numba compiles for types, not for shapes."""
        ones = torch.ones(1, 2, dtype=self._dtype)
        hidden, weight = self.embed(torch.zeros(1, dtype=torch.int64), ones), torch.ones(2, 2, dtype=self._dtype)
        self.norm_linear(hidden, ones[0], 1.0, weight, None)
        self.norm_swiglu(hidden, ones[0], 1.0, weight, None)
        self.linear_add(hidden, weight, None, hidden)
        cache, zero = ones.view(1, 1, 1, 2), torch.zeros(1, dtype=torch.int64)
        heads, slots = HeadLayout(1, 1, 2, 1.0), TokenSlots(zero, zero)
        q, _, _ = self.qk_norm_rope_store(
            torch.ones(1, 6), heads, NO_QK_NORM, torch.ones(1, 2), slots, (cache, cache.clone())
        )
        tables = np.zeros((1, 1), np.int32)
        self.paged_decode(
            as_array(q), as_array(cache), as_array(cache), tables, tables[0] + np.int32(1), 1.0,
            np.empty((1, 1, 2), np.float32), self.num_threads,
        )  # fmt: skip

    def use_threads(self) -> None:
        """Numba keeps this per thread of Python."""
        if self._kernels is not None:
            import numba

            self.num_threads = min(self.num_threads, numba.config.NUMBA_NUM_THREADS)
            numba.set_num_threads(self.num_threads)

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(token_ids, weight).float() if self._kernels else super().embed(token_ids, weight)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if len(x) > self._most_tokens:
            return super().linear_add(x, weight, bias, residual)
        out = np.empty(residual.shape, np.float32)
        self._kernels.linear_add(
            as_array(x.float()), as_array(weight), self._optional(bias), as_array(residual), out, self.num_threads
        )
        return torch.from_numpy(out)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > self._most_tokens:
            return super().norm_linear(x, norm_weight, eps, weight, bias)
        out = np.empty((len(x), len(weight)), np.float32)
        self._kernels.norm_linear(
            as_array(x), as_array(norm_weight), eps, as_array(weight), self._optional(bias), out, self.num_threads
        )
        return torch.from_numpy(out)

    def norm_swiglu(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) > self._most_tokens:
            return super().norm_swiglu(x, norm_weight, eps, weight, bias)
        gate_up = np.empty((len(x), len(weight)), np.float32)
        out = np.empty((len(x), len(weight) // 2), np.float32)
        self._kernels.norm_swiglu(
            as_array(x), as_array(norm_weight), eps, as_array(weight), self._optional(bias), gate_up, out,
            self.num_threads,
        )  # fmt: skip
        return torch.from_numpy(out)

    def qk_norm_rope_store(
        self, qkv: Tensor, heads: HeadLayout, norm: QKNorm, cos_sin: Tensor, slots: TokenSlots, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class, in the cache's dtype. Every slot is written: steps on a CPU have no padding."""
        if self._kernels is None:
            return super().qk_norm_rope_store(qkv, heads, norm, cos_sin, slots, cache)
        q, k, v = (
            torch.empty(len(qkv), count, heads.head_dim, dtype=cache[0].dtype)
            for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        )
        self._kernels.qk_norm_rope_store(
            as_array(qkv.float().view(len(qkv), -1, heads.head_dim)),
            self._optional(norm.q_weight), self._optional(norm.k_weight), norm.eps,
            as_array(cos_sin), as_array(slots.positions), *map(as_array, cache), as_array(slots.slot_mapping),
            as_array(q), as_array(k), as_array(v), self.num_threads,
        )  # fmt: skip
        return q, k, v

    def _optional(self, weight: Tensor | None) -> NDArray[Any]:
        return self._nothing if weight is None else as_array(weight)


def as_array(x: Tensor) -> NDArray[Any]:
    """The memory of a contiguous tensor; bfloat16 as uint16."""
    assert x.is_contiguous(), x.stride()
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


if __name__ == "__main__":  # fills numba's cache, as a first start does for one dtype
    for each in NUMBA_MOST_TOKENS:
        NumbaKernels(each).compile()
