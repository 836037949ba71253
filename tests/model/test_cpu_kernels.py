"""The CPU's kernel set gives what the plain set gives, in every shape, and changes nothing that it was given."""

from __future__ import annotations

import pytest
import torch
from runner_driver import Driver, decoder_from_hf
from transformers import AutoModelForCausalLM, Qwen3Config

from nanoinfer.kernels import cpu_set
from nanoinfer.kernels.cpu_set import FEW_TOKENS, CpuKernels
from nanoinfer.kernels.heads import HeadLayout, QKNorm, TokenSlots
from nanoinfer.kernels.kernel_set import EAGER

TOKENS = [1, 2, 3, 16, FEW_TOKENS, FEW_TOKENS + 1, 200]
DTYPES = [torch.float32, torch.bfloat16]
# out x in: divisible by the number of blocks, not divisible, prime, one row
SHAPES = [(192, 96), (190, 96), (131, 57), (1, 33)]
# One rounding of the result, and what two orders of summation may differ by.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 2e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 2**-9}}


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


@pytest.fixture(params=["widened", "native"])
def narrow_product(request, monkeypatch):
    """Both ways of multiplying narrow matrices, whatever this machine has."""
    monkeypatch.setattr(cpu_set, "has_native_product", lambda dtype: request.param == "native")
    return request.param


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """The number of row blocks follows the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("narrow_product", "threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_linear_is_the_plain_product(num_tokens, has_bias, dtype):
    kernels = CpuKernels(dtype)
    for out_features, in_features in SHAPES:
        x = normal(num_tokens, in_features, dtype=dtype)
        weight = normal(out_features, in_features, dtype=dtype, scale=in_features**-0.5)
        bias = normal(out_features, dtype=dtype) if has_bias else None
        residual = normal(num_tokens, out_features, dtype=dtype)
        given = [None if t is None else t.clone() for t in (x, weight, bias, residual)]
        for _ in range(2):  # a bias that a first call added to itself would show in the second
            out = kernels.linear(x, weight, bias)
            assert out.dtype == dtype
            torch.testing.assert_close(out, EAGER.linear(x, weight, bias), **TOLERANCE[dtype])
        # Where a rounded product almost cancels the residual, its rounding is large beside the sum: absolute.
        torch.testing.assert_close(
            kernels.linear_add(x, weight, bias, residual),
            EAGER.linear_add(x, weight, bias, residual),
            rtol=TOLERANCE[dtype]["rtol"],
            atol=2**-6 if dtype == torch.bfloat16 else 2e-6,
        )
        for tensor, before in zip((x, weight, bias, residual), given, strict=True):
            assert tensor is None or torch.equal(tensor, before)


@pytest.mark.parametrize("num_tokens", TOKENS[1:])
@pytest.mark.parametrize("bytes_at_once", [4, 57 * 4 * 10, 57 * 4 * 1000])
def test_widened_product_is_rounded_once(num_tokens, bytes_at_once, monkeypatch):
    """The scratch holds less than a row, some of the rows (and an odd rest), or all of them."""
    monkeypatch.setattr(cpu_set, "has_native_product", lambda dtype: False)
    monkeypatch.setattr(cpu_set, "WIDENED_BYTES", bytes_at_once)
    x, weight = normal(num_tokens, 57, dtype=torch.bfloat16), normal(131, 57, dtype=torch.bfloat16, scale=0.13)
    bias = normal(131, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().T + bias.double()
    out = CpuKernels(torch.bfloat16).linear(x, weight, bias)
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.usefixtures("narrow_product")
def test_scratch_of_one_matrix_does_not_leak_into_the_next():
    kernels = CpuKernels(torch.bfloat16)
    x = normal(5, 64, dtype=torch.bfloat16)
    weights = [normal(rows, 64, dtype=torch.bfloat16, scale=0.1) for rows in (300, 7, 129)]
    first = kernels.linear(x, weights[0], None)
    expected = first.clone()
    for weight in weights[1:]:
        torch.testing.assert_close(
            kernels.linear(x, weight, None), EAGER.linear(x, weight, None), **TOLERANCE[torch.bfloat16]
        )
    assert torch.equal(first, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_norm_and_activation_are_the_plain_ones(num_tokens, dtype):
    kernels, tight = CpuKernels(dtype), {"rtol": 2e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-7}
    for width in (8, 96, 131):
        x, weight = normal(num_tokens, width, dtype=dtype, scale=3.0), normal(width, dtype=dtype)
        x[0] = 0  # only eps keeps this row finite
        gate_up = normal(num_tokens, 2 * width, dtype=dtype, scale=4.0)
        given = [t.clone() for t in (x, weight, gate_up)]
        normed = kernels.rms_norm(x, weight, 1e-6)
        assert normed.dtype == dtype
        torch.testing.assert_close(normed, EAGER.rms_norm(x, weight, 1e-6), **tight)
        activated = kernels.silu_mul(gate_up)
        assert activated.dtype == dtype
        torch.testing.assert_close(activated, EAGER.silu_mul(gate_up), **tight)
        assert all(torch.equal(a, b) for a, b in zip((x, weight, gate_up), given, strict=True))


@pytest.mark.parametrize("num_tokens", [1, 65])
def test_activation_in_bfloat16_is_rounded_once(num_tokens):
    gate_up = normal(num_tokens, 512, dtype=torch.bfloat16, scale=4.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    exact = gate * gate.sigmoid() * up
    torch.testing.assert_close(CpuKernels(torch.bfloat16).silu_mul(gate_up).double(), exact, rtol=2**-8, atol=1e-7)


@pytest.mark.usefixtures("narrow_product")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [2, 70])
def test_fused_forms_are_the_plain_ones(num_tokens, dtype):
    kernels = CpuKernels(dtype)
    x, norm_weight = normal(num_tokens, 96, dtype=dtype), normal(96, dtype=dtype)
    weight, bias = normal(178, 96, dtype=dtype, scale=0.1), normal(178, dtype=dtype)
    # A norm that is rounded the other way moves the sum by one rounding of an input: absolute, not relative.
    tight = {"rtol": 2**-6, "atol": 2**-5} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    for name in ("norm_linear", "norm_swiglu"):
        actual, expected = (getattr(k, name)(x, norm_weight, 1e-6, weight, bias) for k in (kernels, EAGER))
        torch.testing.assert_close(actual, expected, **tight)


HEADS = [(4, 2, 64), (7, 1, 80), (3, 3, 128)]


def rotary_inputs(num_tokens: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, num_blocks: int = 20):
    angles = torch.arange(512.0)[:, None] * 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    return {
        "qkv": normal(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "positions": torch.randperm(512, generator=torch.Generator().manual_seed(1))[:num_tokens],
        "slot_mapping": torch.randperm(num_blocks * 16, generator=torch.Generator().manual_seed(2))[:num_tokens],
        "caches": [torch.full((num_blocks, 16, kv_heads, head_dim), 9.0, dtype=dtype) for _ in range(2)],
    }


def rotated(kernels, inputs, heads, norm_weights, caches):
    norm = QKNorm(*(norm_weights or (None, None)), 1e-6)
    slots = TokenSlots(inputs["positions"], inputs["slot_mapping"])
    return kernels.qk_norm_rope_store(inputs["qkv"], HeadLayout(*heads, 1.0), norm, inputs["cos_sin"], slots, caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_rotated_heads_and_cache_are_the_plain_ones(num_tokens, heads, has_norm, dtype):
    inputs = rotary_inputs(num_tokens, *heads, dtype)
    norm_weights = (normal(heads[2], dtype=dtype), normal(1, heads[2], dtype=dtype)[0]) if has_norm else None
    given = {name: inputs[name].clone() for name in ("qkv", "cos_sin", "positions", "slot_mapping")}
    expected_caches = [c.clone() for c in inputs["caches"]]
    expected = rotated(EAGER, inputs, heads, norm_weights, expected_caches)
    kernels = CpuKernels(dtype)
    # Rounding to one bfloat16 step beside is allowed twice where a norm and a rotation follow each other.
    tight = {"rtol": 2**-6, "atol": 2**-6} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-6}
    for _ in range(2):  # the second layer of a step rotates by the same positions
        actual_caches = [c.clone() for c in inputs["caches"]]
        actual = rotated(kernels, inputs, heads, norm_weights, actual_caches)
        for a, e in zip((*actual, *actual_caches), (*expected, *expected_caches), strict=True):
            assert a.dtype == dtype
            torch.testing.assert_close(a, e, **tight)
        untouched = torch.ones(actual_caches[0].shape[0] * 16, dtype=torch.bool)
        untouched[inputs["slot_mapping"]] = False
        for cache in actual_caches:
            assert (cache.flatten(0, 1)[untouched] == 9.0).all()
    assert all(torch.equal(inputs[name], before) for name, before in given.items())


def test_positions_of_an_earlier_step_are_not_used_again():
    """Each step's positions are a fresh tensor that often lands where the last one lay."""
    heads = (4, 2, 64)
    inputs = rotary_inputs(3, *heads, torch.float32)
    kernels = CpuKernels(torch.float32)
    for step in range(50):
        inputs["positions"] = torch.tensor([step, step + 1, 500 - step])
        actual, _, _ = rotated(kernels, inputs, heads, None, inputs["caches"])
        expected, _, _ = rotated(EAGER, inputs, heads, None, inputs["caches"])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
        del inputs["positions"]


def test_nothing_to_multiply_gives_nothing():
    for dtype in DTYPES:
        assert CpuKernels(dtype).linear(normal(0, 96, dtype=dtype), normal(8, 96, dtype=dtype), None).shape == (0, 8)


def test_greedy_tokens_are_those_of_the_plain_set():
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=331, hidden_size=96, intermediate_size=178, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=64, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    kernels = CpuKernels(torch.float32)
    prompts = [torch.randint(0, 331, (n,)).tolist() for n in (1, 17, 90, 40)]
    plain = Driver(decoder_from_hf(model)).generate(prompts, 24, chunk=33)
    fast = Driver(decoder_from_hf(model, kernels=kernels), kernels=kernels).generate(prompts, 24, chunk=33)
    assert fast == plain
