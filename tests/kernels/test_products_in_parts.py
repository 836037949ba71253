"""A layer's products with two of them in halves are those of the layer, and are chosen where they gain."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_close, normal

from nanoinfer.kernels import products_in_parts, reference
from nanoinfer.kernels.layer_products import LayerProducts


def layer_products(hidden, attended, inner, qkv, *, bias, device):
    def matrix(rows, columns, seed):
        return (normal(rows, columns, dtype=torch.bfloat16, device=device, seed=seed) * columns**-0.5).contiguous()

    return LayerProducts(
        matrix(hidden, attended, 1),
        normal(hidden, dtype=torch.bfloat16, device=device, seed=2),
        matrix(2 * inner, hidden, 3),
        matrix(hidden, inner, 4),
        normal(hidden, dtype=torch.bfloat16, device=device, seed=5),
        matrix(qkv, hidden, 6),
        normal(qkv, dtype=torch.bfloat16, device=device, seed=7) if bias else None,
        1e-6,
    )


@pytest.mark.parametrize("narrow", [0, 2048])
@pytest.mark.parametrize("bias", [True, False])
def test_halves_add_up_to_the_layer(narrow, bias, device, monkeypatch):
    monkeypatch.setattr(products_in_parts, "NARROW", narrow)
    products = layer_products(64, 96, 160, 80, bias=bias, device=device)
    hidden = normal(5, 64, dtype=torch.bfloat16, device=device)
    attended = normal(5, 104, dtype=torch.bfloat16, device=device)[:, :96]
    expected = hidden.float() + attended.float() @ products.o.float().T
    normed = reference.rms_norm(expected, products.norm.float(), 1e-6)
    expected = expected + reference.silu_mul(normed @ products.gate_up.float().T) @ products.down.float().T
    qkv = reference.rms_norm(expected, products.next_norm.float(), 1e-6) @ products.next_qkv.float().T
    if bias:
        qkv = qkv + products.next_qkv_bias.float()
    actual_hidden, actual_qkv = products_in_parts.between_attentions(attended, hidden, products)
    assert_close(actual_hidden, expected.to(torch.bfloat16))
    assert_close(actual_qkv, qkv.to(torch.bfloat16))


def test_they_are_chosen_where_they_gain(device, monkeypatch):
    monkeypatch.setattr(products_in_parts, "is_hopper", lambda _: True)
    products = layer_products(64, 96, 160, 80, bias=False, device=device)

    def hidden(tokens, dtype=torch.bfloat16):
        return torch.zeros(tokens, 64, dtype=dtype, device=device)

    sizes = (1, 128, 191, 192, 256, 257)
    assert [tokens for tokens in sizes if products_in_parts.pays(hidden(tokens), products)] == [192, 256]
    assert not products_in_parts.pays(hidden(200, torch.float32), products)
    assert not products_in_parts.pays(hidden(200), layer_products(64, 96, 100, 80, bias=False, device=device))
    monkeypatch.setattr(products_in_parts, "is_hopper", lambda _: False)
    assert not products_in_parts.pays(hidden(200), products)
