"""Numba's kernels give what the plain forms give; where numba does not work, torch's run, and the reason is told."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from nanoinfer import LLM, ConfigError, SamplingParams
from nanoinfer.kernels import reference
from nanoinfer.kernels.heads import NO_QK_NORM, HeadLayout, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.kernels.numba_set import NUMBA_MOST_TOKENS, NumbaKernels

DTYPES = [torch.float32, torch.bfloat16]
# out x in: whole tiles and shares, rests of each, a prime, one row
SHAPES = [(192, 96), (190, 95), (131, 57), (1, 33)]
TIGHT = {"rtol": 1e-5, "atol": 5e-6}  # activations are float32 for either dtype: two orders of summation


GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def compiled(dtype: torch.dtype) -> NumbaKernels:
    kernels = NumbaKernels(dtype)
    kernels.compile()
    kernels.use_threads()
    return kernels


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 16, 24, 25, 49])
def test_products_are_the_plain_ones_of_the_widened_weights(num_tokens, has_bias, dtype):
    kernels = compiled(dtype)
    for out_features, in_features in SHAPES:
        x, norm_weight = normal(num_tokens, in_features, scale=3.0), normal(in_features, dtype=dtype)
        x[0] = 0  # only eps keeps this row finite
        weight = normal(2 * out_features, in_features, dtype=dtype, scale=in_features**-0.5)
        bias = normal(2 * out_features, dtype=dtype) if has_bias else None
        residual = normal(num_tokens, 2 * out_features)
        wide = [None if t is None else t.float() for t in (norm_weight, weight, bias)]
        given = [None if t is None else t.clone() for t in (x, norm_weight, weight, bias)]
        for name in ("norm_linear", "norm_swiglu", "linear_add"):
            if name == "linear_add":
                actual = kernels.linear_add(x, weight, bias, residual.clone())
                expected = EAGER.linear_add(x, *wide[1:], residual.clone())
            else:
                actual = getattr(kernels, name)(x, norm_weight, 1e-6, weight, bias)
                expected = getattr(EAGER, name)(x, wide[0], 1e-6, *wide[1:])
            # Beyond the limit torch multiplies, in bfloat16 where this machine can.
            is_ours = num_tokens <= NUMBA_MOST_TOKENS[dtype]
            tolerance = TIGHT if is_ours or dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-4}
            assert actual.dtype == torch.float32 or not is_ours
            torch.testing.assert_close(actual.float(), expected, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
        for tensor, before in zip((x, norm_weight, weight, bias), given, strict=True):
            assert tensor is None or torch.equal(tensor, before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80), (3, 3, 128)])
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_rotated_heads_and_cache_are_the_plain_ones_rounded_once(num_tokens, heads, has_norm, dtype):
    num_heads, num_kv_heads, head_dim = heads
    qkv = normal(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    norms = (normal(head_dim, dtype=dtype), normal(1, head_dim, dtype=dtype)[0]) if has_norm else (None, None)
    angles = torch.arange(64.0)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))[:num_tokens]
    wide_caches = [torch.full((4, 16, num_kv_heads, head_dim), 9.0) for _ in range(2)]
    caches = [c.to(dtype) for c in wide_caches]
    expected = reference.qk_norm_rope_store(
        qkv, *(w if w is None else w.float() for w in norms), 1e-6, cos_sin, order, *wide_caches, order, *heads
    )
    actual = compiled(dtype).qk_norm_rope_store(
        qkv, HeadLayout(*heads, 1.0), QKNorm(*norms, 1e-6), cos_sin, TokenSlots(order, order), caches
    )
    for a, e in zip((*actual, *caches), (*expected, *wide_caches), strict=True):
        assert a.dtype == dtype
        if dtype == torch.bfloat16:  # one step where float32 sums fall on two sides of a tie
            torch.testing.assert_close(a, e.to(dtype), rtol=2**-7, atol=1e-6)
            assert (a == e.to(dtype)).float().mean() > 0.99
        else:
            torch.testing.assert_close(a, e, **TIGHT)


def test_narrow_numbers_are_rounded_like_torchs():
    """Values go through the cache unchanged but for the rounding: ties, the largest numbers, infinities, NaN."""
    tie = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, float("inf"), -float("inf"), float("nan"), 1e-40])
    qkv, cos_sin = torch.zeros(1, 24), torch.ones(1, 8)
    qkv[0, 16:] = tie
    caches = [torch.zeros(1, 16, 1, 8, dtype=torch.bfloat16) for _ in range(2)]
    zero = torch.zeros(1, dtype=torch.int64)
    heads, step = HeadLayout(1, 1, 8, 1.0), TokenSlots(zero, zero)
    compiled(torch.bfloat16).qk_norm_rope_store(qkv, heads, NO_QK_NORM, cos_sin, step, caches)
    torch.testing.assert_close(caches[1][0, 0, 0], tie.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.fixture
def tiny_model(tmp_path) -> str:
    """The shape of a model without weights and tokenizer."""
    shape = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def fail(self):
    raise RuntimeError("no locator available\nmore lines")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.setattr(NumbaKernels, "_run_all", fail), "numba does not work here: no locator available"),
        (lambda m: m.setitem(sys.modules, "numba", None), "numba is not installed"),
    ],
    ids=["fails", "missing"],
)
def test_without_numba_torchs_kernels_run_and_the_reason_is_told(change, reason, tiny_model, monkeypatch):
    with LLM(tiny_model, load_format="dummy", num_blocks=8) as llm:
        assert (llm.info.kernels, llm.info.attention) == ("numba", "numba")
        expected = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    change(monkeypatch)
    with LLM(tiny_model, load_format="dummy", num_blocks=8) as llm:
        assert (llm.info.kernels, llm.info.attention) == ("cpu", "torch")
        assert reason in llm.info.attention_reason
        assert llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids == expected
    with pytest.raises(ConfigError, match=reason):
        LLM(tiny_model, load_format="dummy", num_blocks=8, kernels="numba")
