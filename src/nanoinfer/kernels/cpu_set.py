"""CpuKernels: the kernel set of a CPU. It asks the libraries below torch for the same products in a faster way.

What is slow about the plain way, on AMD and Intel machines without bfloat16 instructions (docs/decisions/020):
* A float32 matrix times one or few rows: the BLAS keeps most of the work on one core. A batch of row blocks of the
  same matrix spreads over all of them.
* A float32 matrix times many rows: oneDNN's code for AVX2 is faster than the BLAS.
* A bfloat16 matrix times two or more rows: there is no code for it without bfloat16 instructions. Widening some rows
  at a time into a buffer that stays in the cache, then multiplying in float32, is far faster and more exact.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels.heads import HeadLayout, KVCache, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import KernelSet

# Up to so many tokens a product is bound by reading the matrix, and row blocks are faster; beyond, oneDNN.
FEW_TOKENS = 64
# Bytes of float32 rows that are widened at a time: half of a small machine's last-level cache.
WIDENED_BYTES = 4 << 20


def has_native_product(dtype: torch.dtype) -> bool:
    """Whether this machine multiplies matrices of `dtype` without emulation."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


class CpuKernels(KernelSet):
    """Weights stay as they are in memory; only `WIDENED_BYTES` of scratch is added, and only for narrow dtypes.

    Without native products of a narrow dtype the activations are float32: each operation on narrow numbers would
    widen and round them again. Keys and values are stored as narrow as the cache is.
    """

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self._is_native = has_native_product(dtype)
        self._num_row_blocks = 2 * torch.get_num_threads()
        self._eps: dict[float, Tensor] = {}
        self._rotated: Tensor | None = None
        self._cos = self._signed_sin = torch.empty(0)
        self._widened = torch.empty(0)
        if not self._is_native:
            self._widened = torch.empty(WIDENED_BYTES // 4)

    def embed(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        rows = F.embedding(token_ids, weight)
        return rows if self._is_native else rows.float()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _to(self._product(x, weight, bias), x.dtype)

    def linear_add(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        return _to(residual + self._product(x, weight, bias), residual.dtype)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As in the base class; where x is float32 the result stays in the dtype of the product."""
        product = self._product(self.rms_norm(x, norm_weight, eps), weight, bias)
        return product if x.dtype == torch.float32 else _to(product, x.dtype)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` in the dtype in which the product is computed: a new tensor."""
        if weight.dtype == torch.float32:
            return self._linear_float32(x, weight, bias)
        # One row is a matrix-vector product, for which torch has code of its own.
        if self._is_native or x.shape[0] == 1:
            return F.linear(_to(x, weight.dtype), weight, bias)
        return self._linear_widened(_to(x, torch.float32), weight, bias)

    def _linear_float32(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        num_tokens, num_blocks = x.shape[0], self._num_row_blocks
        if num_tokens > FEW_TOKENS:
            return _onednn_linear(x, weight, bias)
        out_features, in_features = weight.shape
        if out_features % num_blocks:
            return F.linear(x, weight, bias)
        blocks = weight.view(num_blocks, -1, in_features).transpose(1, 2)
        out = torch.bmm(x.expand(num_blocks, -1, -1), blocks)  # [blocks, T, out / blocks]
        if num_tokens > 1:
            out = out.transpose(0, 1)
        out = out.reshape(num_tokens, out_features)
        return out if bias is None else out.add_(bias)

    def _linear_widened(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out_features, in_features = weight.shape
        rows_at_once = max(self._num_row_blocks, self._widened.numel() // in_features)
        rows_at_once -= rows_at_once % self._num_row_blocks
        if rows_at_once * in_features > self._widened.numel():
            self._widened = torch.empty(rows_at_once * in_features)
        out = torch.empty(x.shape[0], out_features)
        for start in range(0, out_features, rows_at_once):
            rows = weight[start : start + rows_at_once]
            wide_rows = self._widened[: rows.numel()].view(rows.shape).copy_(rows)
            wide_bias = None if bias is None else bias[start : start + rows_at_once].float()
            out[:, start : start + rows_at_once] = self._linear_float32(x, wide_rows, wide_bias)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # torch's mean and rms_norm start slowly on few tokens; the Euclidean norm gives the same sum of squares.
        if eps not in self._eps:
            self._eps[eps] = torch.tensor(eps)
        wide = _to(x, torch.float32)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps[eps], norm, norm, value=1 / x.shape[-1]).rsqrt_()
        normed: Tensor = (wide * scale).mul_(weight)
        return _to(normed, x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = _to(gate_up, torch.float32).chunk(2, dim=-1)
        return _to(F.silu(gate).mul_(up), gate_up.dtype)

    def qk_norm_rope_store(
        self, qkv: Tensor, heads: HeadLayout, norm: QKNorm, cos_sin: Tensor, slots: TokenSlots, cache: KVCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base class, in the cache's dtype. Every slot is written: steps on a CPU have no padding."""
        num_heads, num_kv_heads, head_dim = heads.counts
        k_cache, v_cache = cache
        qk, v = qkv.view(len(qkv), -1, head_dim).split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
        if norm.q_weight is not None and norm.k_weight is not None:
            q = self.rms_norm(qk[:, :num_heads], norm.q_weight, norm.eps)
            qk = torch.cat((q, self.rms_norm(qk[:, num_heads:], norm.k_weight, norm.eps)), dim=1)
        qk = _to(self._rotate(qk, cos_sin, slots.positions), k_cache.dtype)
        q, k = qk.split_with_sizes((num_heads, num_kv_heads), dim=1)
        v = _to(v, v_cache.dtype)
        k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots.slot_mapping, k)
        v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slots.slot_mapping, v)
        return q, k, v

    def _rotate(self, x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [T, heads, D] -> float32."""
        if self._rotated is not positions:  # all layers of a step pass the same tensor
            cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
            self._rotated = positions
            self._cos, self._signed_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        wide = _to(x, torch.float32)
        halves_swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        return (wide * self._cos).addcmul_(halves_swapped, self._signed_sin)


def _to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), without the call where there is nothing to do: with few tokens calls are a large part of a step."""
    return x if x.dtype == dtype else x.to(dtype)


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias through oneDNN, which torch's own linear leaves aside for float32."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
