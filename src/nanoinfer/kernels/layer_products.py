"""LayerProducts: the weights of everything that a layer computes between its attention and the next layer's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LayerProducts:
    """hidden += o(attended); hidden += down(swiglu(gate_up(norm(hidden)))); qkv = next_qkv(next_norm(hidden)) + bias.

    Of Q attention features, H hidden and I inner ones: o [H, Q], norm [H], gate_up [2 I, H] (gate rows, then up rows),
    down [H, I], next_norm [H], next_qkv [(heads + 2 kv_heads) D, H], next_qkv_bias or None.
    """

    o: Tensor
    norm: Tensor
    gate_up: Tensor
    down: Tensor
    next_norm: Tensor
    next_qkv: Tensor
    next_qkv_bias: Tensor | None
    eps: float
