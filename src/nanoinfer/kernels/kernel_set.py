"""KernelSet: the operations that a decoder calls, so that a device's fast forms replace the plain ones in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from nanoinfer.kernels import reference


@dataclass(frozen=True)
class KernelSet:
    """One implementation of each operation; signatures and meaning are those in `reference`.

    `linear(x, weight, bias)` is x @ weight.T + bias with x [T, in], weight [out, in], bias [out] or None.
    """

    name: str
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_mul: Callable[[Tensor], Tensor]
    qk_norm_rope_store: Callable[..., tuple[Tensor, Tensor, Tensor]]


EAGER = KernelSet(
    name="eager",
    linear=F.linear,
    rms_norm=reference.rms_norm,
    add_rms_norm=reference.add_rms_norm,
    silu_mul=reference.silu_mul,
    qk_norm_rope_store=reference.qk_norm_rope_store,
)
