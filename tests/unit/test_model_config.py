"""ModelConfig: every published variant of config.json is read the same way, and what is not supported is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from nanoinfer.errors import ModelError
from nanoinfer.models.config import ModelConfig, RopeConfig, token_ids

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960,
    "tie_word_embeddings": True, "attention_bias": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645, "sliding_window": None, "use_sliding_window": False,
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_32B = QWEN3_8B | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64,
}  # fmt: skip
QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "max_position_embeddings": 32768, "tie_word_embeddings": True, "sliding_window": 32768,
    "use_sliding_window": False, "max_window_layers": 21,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "max_position_embeddings": 131072,
    "tie_word_embeddings": False, "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
LLAMA32_1B = LLAMA31_8B | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "rope_scaling": LLAMA3_ROPE | {"factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 32768, "sliding_window": 4096, "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


def parse(base: dict[str, Any], **changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(base | changes, source="config.json")


def without(base: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in names}


def refusal(base: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ModelError) as caught:
        parse(base, **changes)
    assert str(caught.value).startswith("config.json: ")
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "parameters", "kv_bytes"),
    [
        (QWEN3_06B, 596_049_920, 114_688),
        (QWEN3_8B, 8_190_735_360, 147_456),
        (QWEN3_32B, 32_762_123_264, 262_144),
        (QWEN25_05B, 494_032_768, 12_288),
        (LLAMA31_8B, 8_030_261_248, 131_072),
        (LLAMA32_1B, 1_235_814_400, 32_768),
        (MISTRAL_7B, 7_241_732_096, 131_072),
        (SMOLLM2, 134_515_008, 23_040),
    ],
    ids=["qwen3-0.6b", "qwen3-8b", "qwen3-32b", "qwen2.5-0.5b", "llama3.1-8b", "llama3.2-1b", "mistral-7b", "smollm2"],
)
def test_published_models_have_their_published_size(config: dict[str, Any], parameters: int, kv_bytes: int) -> None:
    model = parse(config)
    assert model.num_parameters() == parameters
    assert model.weight_bytes("bfloat16") == 2 * parameters
    assert model.weight_bytes("float32") == 4 * parameters
    assert model.kv_bytes_per_token(2) == kv_bytes


def test_kv_heads_are_split_over_ranks_and_replicated_below_one() -> None:
    model = parse(QWEN25_05B)  # 2 KV heads
    assert [model.kv_heads_per_rank(tp) for tp in (1, 2, 14)] == [2, 1, 1]
    assert model.kv_bytes_per_token(2, tp=2) == model.kv_bytes_per_token(2, tp=14) == 6144
    assert model.kv_heads_per_rank(7) == 2  # of its 14 heads, rank 3 has the last of one group and the first of another


def test_ranks_together_hold_the_model_and_the_replicated_norms() -> None:
    model = parse(QWEN3_8B)
    norms = model.num_layers * (2 * model.hidden_size + 2 * model.head_dim) + model.hidden_size
    assert 8 * model.num_parameters(tp=8) == model.num_parameters() + 7 * norms


def test_switches_of_each_family() -> None:
    def switches(config: dict[str, Any], **changes: Any) -> tuple[bool, ...]:
        model = parse(config, **changes)
        return model.qk_norm, model.qkv_bias, model.o_bias, model.mlp_bias

    assert switches(QWEN3_06B) == (True, False, False, False)
    assert switches(QWEN3_06B, attention_bias=True) == (True, True, True, False)
    assert switches(QWEN25_05B) == (False, True, False, False)
    assert switches(LLAMA31_8B) == (False, False, False, False)
    assert switches(LLAMA31_8B, attention_bias=True, mlp_bias=True) == (False, True, True, True)
    assert switches(MISTRAL_7B, attention_bias=True, mlp_bias=True) == (False, False, False, False)


# -- rope: one normal form, wherever it was written


def test_transformers5_writes_null_rope_scaling_as_a_default_dict() -> None:
    old = parse(QWEN3_06B).rope
    new = without(QWEN3_06B, "rope_theta", "rope_scaling")
    assert parse(new, rope_parameters={"rope_type": "default", "rope_theta": 1000000}).rope == old
    assert parse(new, rope_scaling={"type": "default", "rope_theta": 1000000}).rope == old
    nested = {"full_attention": {"rope_type": "default", "rope_theta": 1000000}}
    assert parse(new, rope_parameters=nested).rope == old
    assert old == RopeConfig(theta=1e6)


def test_theta_only_in_rope_parameters_does_not_fall_back_to_a_guess() -> None:
    config = without(QWEN3_06B, "rope_theta")
    assert parse(config, rope_parameters={"rope_theta": 5000}).rope.theta == 5000
    assert "rope_theta" in refusal(config)


def test_theta_inside_the_rope_parameters_wins_over_the_top_level() -> None:
    assert parse(QWEN3_06B, rope_parameters={"rope_theta": 5000}, rope_theta=7).rope.theta == 5000


def test_llama3_and_yarn_rope_are_not_silently_ignored() -> None:
    rope = parse(LLAMA32_1B).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 32.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    rope = parse(QWEN3_06B, rope_scaling={"rope_type": "yarn", "factor": 4.0}).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 40960)
    rope = parse(SMOLLM2, rope_scaling={"type": "linear", "factor": 2}).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)


def test_yarn_attention_factor_is_resolved_from_all_its_fields() -> None:
    def attention_factor(**fields: Any) -> float:
        return parse(QWEN3_06B, rope_scaling={"rope_type": "yarn", "factor": 4.0} | fields).rope.attention_factor

    assert attention_factor() == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(factor=1.0) == 1.0
    assert attention_factor(attention_factor=0.7, mscale=2.0, mscale_all_dim=1.0) == 0.7
    ratio = (0.2 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert attention_factor(mscale=2.0, mscale_all_dim=0.5) == pytest.approx(ratio)
    assert attention_factor(mscale=2.0) == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_ramp_fields_and_an_original_length_beside_rope_scaling() -> None:
    yarn = {"type": "yarn", "factor": None, "beta_fast": 16, "beta_slow": 2, "truncate": False}
    rope = parse(QWEN3_06B, rope_scaling=yarn, original_max_position_embeddings=8192).rope
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)
    assert (rope.original_max_position_embeddings, rope.factor) == (8192, 5.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope", "proportional"])
def test_other_rope_kinds_are_refused_by_name(kind: str) -> None:
    assert f"'{kind}'" in refusal(QWEN3_06B, rope_scaling={"rope_type": kind, "factor": 2.0})


def test_partial_rotation_is_refused() -> None:
    assert "partial_rotary_factor 0.5" in refusal(QWEN3_06B, partial_rotary_factor=0.5)
    parameters = {"rope_theta": 1e6, "partial_rotary_factor": 0.25}
    assert "partial_rotary_factor 0.25" in refusal(QWEN3_06B, rope_parameters=parameters)


# -- fields that are null, renamed or somewhere else


@pytest.mark.parametrize("config", [SMOLLM2, SMOLLM2 | {"head_dim": None}], ids=["absent", "null"])
def test_head_dim_present_but_null(config: dict[str, Any]) -> None:
    assert parse(config).head_dim == 64


def test_kv_heads_absent_or_null_means_one_for_each_head() -> None:
    assert parse(without(SMOLLM2, "num_key_value_heads")).num_kv_heads == 9
    assert parse(SMOLLM2, num_key_value_heads=None).num_kv_heads == 9


def test_dtype_under_either_name_or_absent() -> None:
    config = without(QWEN3_06B, "torch_dtype")
    assert parse(config, dtype="float16").dtype == "float16"
    assert parse(config, torch_dtype="torch.bfloat16").dtype == "bfloat16"
    assert parse(config, dtype="bfloat16", torch_dtype="float32").dtype == "bfloat16"
    assert parse(config).dtype is None


def test_eos_is_one_id_a_list_or_nothing() -> None:
    assert token_ids(QWEN3_06B["eos_token_id"]) == (151645,)
    assert token_ids(LLAMA31_8B["eos_token_id"]) == (128001, 128008, 128009)
    assert token_ids(None) == token_ids([None, -1, True]) == ()
    assert token_ids(0) == (0,)


def test_the_language_model_inside_a_multimodal_config() -> None:
    text = without(MISTRAL_7B, "architectures") | {"model_type": "mistral", "sliding_window": None}
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    model = ModelConfig.from_dict(outer, source="config.json")
    assert (model.architecture, model.dtype, model.num_parameters()) == ("MistralForCausalLM", "bfloat16", 7241732096)


def test_model_type_names_the_family_where_architectures_is_absent() -> None:
    assert parse(without(SMOLLM2, "architectures"), model_type="llama").architecture == "LlamaForCausalLM"


# -- sliding windows


def test_a_qwen_window_that_is_switched_off_does_not_matter() -> None:
    assert parse(QWEN25_05B, sliding_window=4096).max_position_embeddings == 32768


def test_a_qwen_window_that_is_active_is_refused_by_name() -> None:
    active = {"use_sliding_window": True, "sliding_window": 4096}
    assert "use_sliding_window" in refusal(QWEN25_05B, **active)
    assert "use_sliding_window" in refusal(QWEN25_05B, **active, max_window_layers=0)
    assert "use_sliding_window" in refusal(QWEN25_05B, **active, layer_types=["sliding_attention"] * 24)
    # No layer slides, or the window is as long as the context.
    assert parse(QWEN25_05B, **active, max_window_layers=24).max_position_embeddings == 32768
    assert parse(QWEN25_05B, **active, layer_types=["full_attention"] * 24).max_position_embeddings == 32768
    assert parse(QWEN25_05B, use_sliding_window=True, sliding_window=32768).max_position_embeddings == 32768


def test_a_mistral_window_shortens_the_longest_sequence() -> None:
    assert parse(MISTRAL_7B).max_position_embeddings == 4096
    assert parse(MISTRAL_7B, sliding_window=None).max_position_embeddings == 32768
    assert parse(MISTRAL_7B, sliding_window=65536).max_position_embeddings == 32768


def test_other_layer_types_are_refused_by_name() -> None:
    assert "'linear_attention'" in refusal(QWEN3_06B, layer_types=["full_attention", "linear_attention"])


# -- what is not supported


def test_unknown_architecture_is_refused_with_the_supported_ones() -> None:
    text = refusal(QWEN3_06B, architectures=["GemmaForCausalLM"])
    assert "GemmaForCausalLM" in text
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in text
    assert "architecture GemmaForCausalLM is" in refusal(
        QWEN3_06B, architectures="GemmaForCausalLM"
    )  # not G, e, m, ...
    assert parse(QWEN3_06B, architectures="Qwen3ForCausalLM").architecture == "Qwen3ForCausalLM"
    assert "names no architecture" in refusal(without(QWEN3_06B, "architectures"))


def test_quantised_weights_are_refused_by_name() -> None:
    assert "'gptq'" in refusal(QWEN3_06B, quantization_config={"quant_method": "gptq", "bits": 4})


def test_other_activations_are_refused_by_name() -> None:
    assert "'gelu'" in refusal(QWEN3_06B, hidden_act="gelu")


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"])
def test_a_missing_field_is_named(name: str) -> None:
    assert f"'{name}' is missing" in refusal(without(QWEN3_06B, name))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_key_value_heads": 5}, "16 attention heads cannot share 5"),
        ({"head_dim": 63}, "head_dim is 63"),
        ({"head_dim": None, "hidden_size": 1000}, "1000 is not a multiple of 16"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"hidden_size": "1024"}, "'hidden_size' is '1024'"),
        ({"rms_norm_eps": -1.0}, "'rms_norm_eps' is -1.0"),
        ({"rope_theta": float("nan")}, "'rope_theta' is nan"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": "linear"}, "must be an object"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_impossible_values_are_refused(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(QWEN3_06B, **changes)
