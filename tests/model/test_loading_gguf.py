"""GGUF import: the folder that comes out is the same model, whatever the family, tensor type or rope."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as QuantType
from gguf_files import SCALES, TINY, random_blocks, tiny_shapes, write_gguf, write_tiny
from safetensors.torch import load_file

from nanoinfer.errors import ModelError
from nanoinfer.loading.folder import read_eos_token_ids, read_model_config
from nanoinfer.loading.gguf import import_gguf
from nanoinfer.loading.gguf_file import read_gguf
from nanoinfer.models.config import RopeConfig


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def refusal(path: Path) -> str:
    """The message; the cache is left as if nobody had asked."""
    cache = path.parent / "cache"
    before = sorted(cache.rglob("*"))
    with pytest.raises(ModelError) as caught:
        import_gguf(path)
    assert sorted(cache.rglob("*")) == before
    assert str(path) in str(caught.value)
    return str(caught.value)


# -- tensor types


@pytest.mark.parametrize("kind", sorted(SCALES))
def test_quantised_tensors_become_exactly_their_float32_values(tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(1)
    raw = {name: random_blocks(kind, (512, 512), rng) for name in ("blk.0.ffn_down.weight", "blk.1.ffn_down.weight")}
    path = write_tiny(tmp_path / "m.gguf", tensors={name: (kind, data) for name, data in raw.items()})
    read = weights(import_gguf(path))
    for i, data in enumerate(raw.values()):
        expected = torch.from_numpy(gguf.dequantize(data, QuantType[kind]))
        assert torch.equal(read[f"model.layers.{i}.mlp.down_proj.weight"], expected)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_stay_near_what_was_quantised(tmp_path: Path, kind: str) -> None:
    given = np.random.default_rng(2).normal(0, 1, (256, 512)).astype(np.float32)
    tensors = {"blk.0.ffn_down.weight": (kind, gguf.quantize(given, QuantType[kind]))}
    read = weights(import_gguf(write_tiny(tmp_path / "m.gguf", tensors=tensors)))
    error = (read["model.layers.0.mlp.down_proj.weight"] - torch.from_numpy(given)).abs().max()
    assert error < {"Q8": 0.03, "Q4": 0.5, "Q5": 0.25}[kind[:2]]


@pytest.mark.parametrize(("kind", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)])
def test_float_tensors_keep_their_type(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    given = torch.randn(256, 512).to(dtype)
    data = given.numpy() if kind != "BF16" else given.view(torch.uint8).numpy()
    read = weights(import_gguf(write_tiny(tmp_path / "m.gguf", tensors={"blk.0.ffn_down.weight": (kind, data)})))
    assert read["model.layers.0.mlp.down_proj.weight"].dtype == dtype
    assert torch.equal(read["model.layers.0.mlp.down_proj.weight"], given)


def test_permuted_rows_of_a_quantised_tensor(tmp_path: Path) -> None:
    raw = random_blocks("Q4_1", (256, 256), np.random.default_rng(3))
    read = weights(import_gguf(write_tiny(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": ("Q4_1", raw)})))
    rows = gguf.dequantize(raw, QuantType.Q4_1)
    # Row 2i of a head is the first half's row i, row 2i + 1 the second half's.
    expected = np.concatenate([np.concatenate([rows[h * 64 : h * 64 + 64][s::2] for s in (0, 1)]) for h in range(4)])
    assert torch.equal(read["model.layers.0.self_attn.q_proj.weight"], torch.from_numpy(expected))


# -- families, against transformers


def reference_model(arch: str, **changes: Any) -> Any:
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    options = {
        "vocab_size": 40, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    } | changes  # fmt: skip
    if arch == "qwen3":
        options.setdefault("head_dim", 64)
    torch.manual_seed(0)
    config = getattr(transformers, f"{names[arch]}Config")(**options)
    return getattr(transformers, f"{names[arch]}ForCausalLM")(config).eval()


def gguf_of(model: Any, arch: str, path: Path, **options: Any) -> Path:
    """Convert as llama.cpp's script does: rename, and interleave the two rotary halves of llama's q and k heads."""
    name_map = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), 2)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        base, suffix = name.rsplit(".", 1)
        data = tensor.numpy()
        if arch == "llama" and base.endswith(("q_proj", "k_proj")):
            heads = model.config.num_attention_heads if base.endswith("q_proj") else model.config.num_key_value_heads
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        tensors[f"{name_map.get_name(base)}.{suffix}"] = ("F32", data)
    return write_gguf(path, tensors, arch=arch, **options)


@pytest.mark.parametrize(
    ("arch", "changes", "metadata"),
    [
        ("llama", {}, {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}, {}),
        (
            "llama",
            {"head_dim": 32},
            {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 32},
        ),
        ("qwen2", {"tie_word_embeddings": False}, {}),
        ("qwen3", {}, {"attention.key_length": 64, "attention.value_length": 64}),
        ("qwen3", {"head_dim": 128}, {"attention.key_length": 128, "rope.dimension_count": 128}),
    ],
    ids=["llama", "llama-biases-untied", "llama-head-dim", "qwen2-untied", "qwen3", "qwen3-head-dim"],
)
def test_every_family_comes_back_as_the_same_model(
    tmp_path: Path, arch: str, changes: dict[str, Any], metadata: dict[str, Any]
) -> None:
    import transformers

    model = reference_model(arch, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            torch.nn.init.normal_(parameter)  # all equal by default, which would hide a wrong place
    path = gguf_of(model, arch, tmp_path / "m.gguf", metadata=TINY | metadata)
    folder = import_gguf(path)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert read_model_config(folder).num_parameters() == sum(p.numel() for p in model.parameters())


def test_the_built_in_model_equals_transformers_reading_of_the_same_file(
    smollm2_gguf: Path, smollm2_folder: Path
) -> None:
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=model)["tensors"]
    read = weights(smollm2_folder)
    assert set(expected) == set(read)
    assert all(torch.equal(read[name], expected[name].float()) for name in read)
    ours = read_model_config(smollm2_folder)
    assert (ours.num_heads, ours.num_kv_heads, ours.head_dim) == (9, 3, 64)
    assert ours.rms_norm_eps == config.rms_norm_eps
    assert ours.rope == RopeConfig(theta=config.rope_parameters["rope_theta"])
    assert ours.max_position_embeddings == config.max_position_embeddings == 8192
    assert ours.num_parameters() == 134_515_008
    assert read_eos_token_ids(smollm2_folder) == (2,)


# -- rope


def rope_of(path: Path) -> RopeConfig:
    return read_model_config(import_gguf(path)).rope


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert rope_of(write_tiny(tmp_path / "l.gguf", metadata=TINY | linear)) == RopeConfig(
        kind="linear", theta=10000.0, factor=2.0
    )
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}
    rope = rope_of(write_tiny(tmp_path / "y.gguf", metadata=TINY | yarn))
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    none = {"rope.scaling.type": "none", "rope.scaling.factor": 0.0}
    assert rope_of(write_tiny(tmp_path / "n.gguf", metadata=TINY | none)) == RopeConfig(theta=10000.0)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_its_factors(tmp_path: Path, factor: float) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    llama3 = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 8192, "rope_theta": 500000.0}  # fmt: skip
    config = reference_model("llama", rope_parameters=llama3).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    tensors = {"rope_freqs.weight": ("F32", (plain / scaled).numpy())}
    metadata = TINY | {"rope.freq_base": 500000.0}
    rope = rope_of(write_tiny(tmp_path / "m.gguf", metadata=metadata, tensors=tensors))
    assert rope == RopeConfig.from_dict(
        {"rope_parameters": llama3, "max_position_embeddings": 131072}, source="config.json"
    )


def test_rope_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    longrope = TINY | {"rope.scaling.type": "longrope"}
    assert "'longrope'" in refusal(write_tiny(tmp_path / "a.gguf", metadata=longrope))
    tensors = {"rope_freqs.weight": ("F32", np.linspace(1, 9, 32))}
    assert "rope_freqs.weight" in refusal(write_tiny(tmp_path / "b.gguf", tensors=tensors))
    partial = TINY | {"rope.dimension_count": 32}
    assert "partial rotation" in refusal(write_tiny(tmp_path / "c.gguf", metadata=partial))


# -- what is refused


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    shapes = tiny_shapes()
    assert "'gemma'" in refusal(write_tiny(tmp_path / "a.gguf", arch="gemma"))
    expert = {"blk.0.ffn_gate_inp.weight": ("F32", np.zeros((8, 256)))}
    assert "blk.0.ffn_gate_inp.weight" in refusal(write_tiny(tmp_path / "b.gguf", tensors=expert))
    block, size = gguf.GGML_QUANT_SIZES[QuantType.Q2_K]
    q2 = np.zeros((*shapes["blk.0.ffn_up.weight"][:-1], 256 // block * size), dtype=np.uint8)
    q2_file = write_tiny(tmp_path / "c.gguf", tensors={"blk.0.ffn_up.weight": ("Q2_K", q2)})
    assert "blk.0.ffn_up.weight (Q2_K)" in refusal(q2_file)
    assert "one of 3 parts" in refusal(write_tiny(tmp_path / "d.gguf", extra={"split.count": 3}))
    layered = TINY | {"attention.head_count_kv": [2, 1]}
    assert "differs between layers" in refusal(write_tiny(tmp_path / "e.gguf", metadata=layered))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_heads_that_do_not_fit_their_tensor_are_refused(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_k.weight": ("F32", np.zeros((130, 256)))}
    assert "blk.0.attn_k.weight has 130 rows for 2 heads" in refusal(write_tiny(tmp_path / "m.gguf", tensors=tensors))


def test_a_file_that_is_no_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"PK\3\4" + bytes(100)):
        path.write_bytes(content)
        assert "no GGUF file" in refusal(path)
    for version, words in ((1, "GGUF version 1"), (3 << 24, "big-endian")):
        path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + bytes(100))
        assert words in refusal(path)
    with pytest.raises(ModelError, match="cannot be read"):
        import_gguf(tmp_path / "absent.gguf")


def test_a_file_truncated_anywhere_is_one_clear_error(tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"tok{i}" for i in range(40)]}
    content = write_tiny(tmp_path / "whole.gguf", extra=vocabulary).read_bytes()
    path = tmp_path / "m.gguf"
    header = content.index(b"blk.1.ffn_down.weight")
    for size in [*range(4, 200), *range(200, header, 37), len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:size])
        text = refusal(path)
        assert "truncated" in text, (size, text)


def test_counts_that_lie_end_in_an_error_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    huge = (2**62).to_bytes(8, "little")
    array = b"GGUF" + (3).to_bytes(4, "little") + bytes(8) + (1).to_bytes(8, "little")
    array += (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
    for content in (
        b"GGUF" + (3).to_bytes(4, "little") + huge + huge + bytes(64),
        array + (4).to_bytes(4, "little") + huge + bytes(64),
        array + (8).to_bytes(4, "little") + huge + bytes(64),
    ):
        path.write_bytes(content)
        assert "damaged or truncated" in refusal(path)


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    extra = {"a.bool": True, "a.int": 7, "a.float": 0.5, "a.text": "čau", "a.words": ["x", "žluť"], "a.ints": [1, -2]}
    path = write_tiny(tmp_path / "m.gguf", extra=extra)
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert {name: (t.start, t.size, t.shape, t.type) for name, t in ours.tensors.items()} == {
        t.name: (t.data_offset, t.n_bytes, tuple(t.shape[::-1].tolist()), int(t.tensor_type)) for t in theirs.tensors
    }


def test_config_without_a_type_lets_the_device_decide(tmp_path: Path) -> None:
    config = json.loads((import_gguf(write_tiny(tmp_path / "m.gguf")) / "config.json").read_text())
    assert "dtype" not in config
    assert "torch_dtype" not in config
