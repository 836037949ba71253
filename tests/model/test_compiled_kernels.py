"""The compiled kernel set against the plain one, for one token and for several."""

from __future__ import annotations

import pytest
import setuptools  # noqa: F401  (torch.compile imports it, which fails after some other tests; collecting comes before all)
import torch

from nanoinfer.kernels import compiled_set
from nanoinfer.kernels.heads import HeadLayout, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import EAGER

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch about itself
    pytest.mark.skipif(
        compiled_set.why_not(torch.device("cpu")) is not None, reason="needs a C++ compiler for torch.compile"
    ),
]


def test_equals_the_plain_set_and_compiles_each_function_twice_at_most():
    kernels = compiled_set.CompiledKernels()
    torch.manual_seed(0)
    heads, kv_heads, dim = 4, 2, 16
    for num_tokens in (1, 5, 3, 64):
        x, weight = torch.randn(num_tokens, 48), torch.randn(48)
        torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-6), EAGER.rms_norm(x, weight, 1e-6))
        torch.testing.assert_close(kernels.silu_mul(x), EAGER.silu_mul(x))
        qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * dim)
        slots = torch.randperm(96)[:num_tokens]
        slots[-1] = -1
        results = []
        for one in (kernels, EAGER):
            caches = [torch.zeros(6, 16, kv_heads, dim) for _ in range(2)]
            cos_sin = torch.randn(100, dim, generator=torch.manual_seed(1))
            step = TokenSlots(torch.arange(num_tokens), slots)
            norm = QKNorm(torch.ones(dim), torch.ones(dim), 1e-6)
            layout = HeadLayout(heads, kv_heads, dim, 1.0)
            out = one.qk_norm_rope_store(qkv, layout, norm, cos_sin, step, caches)
            results.append((*out, *caches))
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours, plain)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled <= 6, compiled


def test_no_compiler_is_said(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "C++ compiler" in compiled_set.why_not(torch.device("cpu"))
