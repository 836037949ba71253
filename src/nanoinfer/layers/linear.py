"""Linear layers; several that read the same input are fused into one matrix, which costs one multiplication."""

from __future__ import annotations

import torch
from torch import Tensor

from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.layers.norm import RMSNorm
from nanoinfer.models.partition import Span
from nanoinfer.models.weights import WeightSlot


class Linear:
    """y = x @ weight.T + bias, with the output rows of one or more checkpoint tensors stacked in `weight`.

    `outputs` maps the name of each stacked layer ("q_proj") to this rank's span of its output features, in order; all
    of `inputs` is then on every rank (column-parallel). Where `inputs` is cut instead (row-parallel), each rank's
    product is a part of a sum over the ranks, which `add_to` takes.
    """

    def __init__(
        self,
        inputs: Span,
        outputs: dict[str, Span],
        *,
        bias: bool,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        out_features = sum(map(len, outputs.values()))
        self.weight = torch.empty(out_features, len(inputs), dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._inputs, self._outputs = inputs, outputs
        self._kernels = kernels
        self._group = group

    def after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Of the normed x: [T, in] -> [T, out]."""
        return self._kernels.norm_linear(x, norm.weight, norm.eps, self.weight, self.bias)

    def swiglu_after_norm(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """With two outputs, gate and up: silu(gate) * up of the normed x: [T, in] -> [T, out / 2]."""
        return self._kernels.norm_swiglu(x, norm.weight, norm.eps, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, out] + what the ranks' x [T, in] give together, the same on every rank.

        The residual's memory may be overwritten with it. Rank 0 puts the residual and the bias into its part of the
        sum, so that adding them costs nothing.
        """
        if self._group.rank == 0:
            part = self._kernels.linear_add(x, self.weight, self.bias, residual)
        else:
            part = self._kernels.linear(x, self.weight, None).to(residual.dtype)
        return self._group.all_reduce(part)

    def weight_slots(self, prefix: str) -> dict[str, WeightSlot]:
        """The checkpoint tensors `prefix.PART.weight` (and `.bias`), each a view of its rows."""
        slots = {}
        start = 0
        for name, span in self._outputs.items():
            stop = start + len(span)
            rows, columns = span.shard(0), self._inputs.shard(1)
            assert rows is None or columns is None, (name, span, self._inputs)
            shape = (span.size, self._inputs.size)
            slots[f"{prefix}.{name}.weight"] = WeightSlot(self.weight[start:stop], shape, rows or columns)
            if self.bias is not None:
                slots[f"{prefix}.{name}.bias"] = WeightSlot(self.bias[start:stop], shape[:1], rows)
            start = stop
        return slots
