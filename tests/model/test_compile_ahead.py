"""Running every operation of the first steps ahead: nothing is written, and what a kernel raises is not lost."""

from __future__ import annotations

import pytest
import torch
from test_parity import FAMILIES

from nanoinfer.attention.torch import TorchAttention
from nanoinfer.kernels.heads import HeadLayout
from nanoinfer.kernels.kernel_set import EAGER, KernelSet
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.decoder import Decoder
from nanoinfer.runner.compile_ahead import FEW_TOKENS, MANY_TOKENS, KernelCompilation


class Recording(KernelSet):
    def __init__(self):
        self.seen = set()

    def norm_linear(self, x, *args):
        self.seen.add(("norm_linear", len(x)))
        return EAGER.norm_linear(x, *args)

    def linear_add(self, x, *args):
        self.seen.add(("linear_add", len(x)))
        return EAGER.linear_add(x, *args)

    def norm_swiglu(self, x, *args):
        self.seen.add(("norm_swiglu", len(x)))
        return EAGER.norm_swiglu(x, *args)

    def head_best(self, x, *args):
        self.seen.add(("head_best", len(x)))
        return EAGER.head_best(x, *args)


def start(kernels):
    config = ModelConfig.from_dict(FAMILIES["qwen3-gqa2"].to_dict(), source="test")
    model = Decoder(config, kernels=kernels, dtype=torch.float32, device=torch.device("cpu"))
    cache = tuple(torch.full((1, 16, config.num_kv_heads, config.head_dim), 7.0) for _ in range(2))
    heads = HeadLayout(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
    attention = TorchAttention(heads, torch.zeros(32, config.head_dim), kernels)
    return KernelCompilation(model, attention, cache), cache


def test_every_operation_runs_at_every_size_and_the_cache_stays_as_it_is():
    kernels = Recording()
    compilation, cache = start(kernels)
    compilation.wait()
    sizes = (*FEW_TOKENS, MANY_TOKENS)
    expected = {(name, tokens) for name in ("norm_linear", "linear_add", "norm_swiglu") for tokens in sizes}
    assert kernels.seen == expected | {("head_best", 1)}
    assert all((tensor == 7).all() for tensor in cache)


def test_what_a_kernel_raises_is_raised():
    class Broken(Recording):
        def norm_swiglu(self, x, *args):
            raise RuntimeError("no assembler")

    compilation, _ = start(Broken())
    with pytest.raises(RuntimeError, match="no assembler"):
        compilation.wait()
