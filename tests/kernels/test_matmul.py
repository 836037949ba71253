"""GEMV, skinny and tiled matrix product, with everything that is fused into them, against the torch twins."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import assert_close, normal

from nanoinfer.kernels import few_tokens_matmul, gemv, reference, skinny_matmul
from nanoinfer.kernels.few_tokens_matmul import TileConfig

EPS = 1e-6


def expected(x, weight, norm_weight=None, bias=None, residual=None, swiglu=False):
    wide = x.float()
    if norm_weight is not None:
        wide = reference.rms_norm(wide, norm_weight.float(), EPS)
    out = wide @ weight.float().T
    if swiglu:
        out = reference.silu_mul(out)
    if bias is not None:
        out = out + bias.float()
    if residual is not None:
        out = out + residual.float()
    return out.to(x.dtype)


def gemv_in_tiles(*args, **kwargs):
    return gemv.gemv(*args, config=gemv.GemvConfig(8, 4), **kwargs)


def skinny_in_tiles(*args, **kwargs):
    return skinny_matmul.skinny_matmul(*args, config=skinny_matmul.SkinnyConfig(16, 2, 32), **kwargs)


def tiles(*config):
    def product(*args, **kwargs):
        return few_tokens_matmul.few_tokens_matmul(*args, config=TileConfig(*config), **kwargs)

    return product


one_tile = tiles(64, 32, 64, 1, 4, 3)
split_tiles = tiles(16, 16, 32, 3, 2, 2)
wide_tiles = tiles(32, 64, 64, 2, 4, 1)


@pytest.mark.parametrize(
    ("kernel", "tokens"),
    [
        (gemv.gemv, 1),
        (gemv_in_tiles, 1),
        (skinny_matmul.skinny_matmul, 1),
        (skinny_in_tiles, 5),
        (skinny_in_tiles, 17),
        (split_tiles, 2),
        (one_tile, 32),
        (one_tile, 33),
        (split_tiles, 17),
        (wide_tiles, 64),
    ],
)
@pytest.mark.parametrize("fused", ["nothing", "norm", "norm+swiglu", "residual", "norm+bias+residual"])
@pytest.mark.parametrize(("features", "width"), [(48, 128), (37, 200)])
def test_matrix_product_with_what_is_fused(kernel, tokens, fused, features, width, device):
    dtype = torch.bfloat16
    options = {}
    if "norm" in fused:
        options["norm_weight"] = normal(width, dtype=dtype, device=device)
    if "swiglu" in fused:
        options["swiglu"] = True
    if "bias" in fused:
        options["bias"] = normal(features, dtype=dtype, device=device)
    if "residual" in fused:
        options["residual"] = normal(tokens, features, dtype=dtype, device=device)
    x = normal(tokens, width, dtype=dtype, device=device)
    rows = features * (2 if "swiglu" in fused else 1)
    weight = normal(rows, width, dtype=dtype, device=device, seed=1) * width**-0.5
    assert_close(kernel(x, weight, eps=EPS, **options), expected(x, weight, **options))


def test_float32_and_rows_of_a_wider_tensor(device):
    wide = normal(2, 200, dtype=torch.float32, device=device)
    weight = normal(24, 128, dtype=torch.float32, device=device)
    assert_close(skinny_in_tiles(wide[:, :128], weight), expected(wide[:, :128], weight))
    assert_close(gemv.gemv(wide[1:, :128], weight), expected(wide[1:, :128], weight))


@pytest.mark.parametrize(("kernel", "tokens"), [(gemv.gemv, 1), (skinny_in_tiles, 3)])
def test_logits_are_not_rounded_to_the_weights_dtype(kernel, tokens, device):
    x = normal(tokens, 64, dtype=torch.bfloat16, device=device)
    weight = normal(40, 64, dtype=torch.bfloat16, device=device)
    assert_close(kernel(x, weight, out_dtype=torch.float32), x.float() @ weight.float().T)


@pytest.mark.parametrize("swiglu", [False, True])
def test_splits_leave_their_counters_at_zero_and_write_only_the_result(swiglu, device, monkeypatch):
    partial = torch.full((2**16,), float("nan"), device=device)
    counters = torch.zeros(64, dtype=torch.int32, device=device)
    monkeypatch.setattr(few_tokens_matmul, "_workspace", lambda device: (partial, counters))
    outputs = []

    def poisoned(*shape, **options):
        outputs.append(torch.full((shape[0] + 1, shape[1]), float("nan"), **options))
        return outputs[-1][: shape[0]]

    x = normal(17, 200, dtype=torch.bfloat16, device=device)
    weight = normal(96, 200, dtype=torch.bfloat16, device=device, seed=1) * 200**-0.5
    with monkeypatch.context() as patch:
        patch.setattr(few_tokens_matmul.torch, "empty", poisoned)
        first, second = (split_tiles(x, weight, swiglu=swiglu) for _ in range(2))
    assert_close(first, expected(x, weight, swiglu=swiglu))
    assert torch.equal(first, second)
    assert not counters.any()
    assert all(out[-1].isnan().all() for out in outputs)
