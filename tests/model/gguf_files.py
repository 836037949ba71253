"""Writes small GGUF files for tests: any family, any tensor type, with or without a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as QuantType

# Where a block's float16 scales stand: random bytes there could be infinite.
SCALES = {
    "Q8_0": (0, 2), "Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4), "Q4_K": (0, 4), "Q5_K": (0, 4),
    "Q6_K": (208, 210),
}  # fmt: skip

TINY = {
    "block_count": 2, "context_length": 128, "embedding_length": 256, "feed_forward_length": 512,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0, "rope.dimension_count": 64,
}  # fmt: skip
TINY_VOCABULARY = 40


def tiny_shapes(arch: str = "llama") -> dict[str, tuple[int, ...]]:
    """GGUF name -> shape, rows first, of the model that TINY describes; its embedding is tied."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (TINY_VOCABULARY, 256), "output_norm.weight": (256,)}
    for i in range(2):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (256,), "ffn_norm.weight": (256,), "attn_q.weight": (256, 256),
            "attn_k.weight": (128, 256), "attn_v.weight": (128, 256), "attn_output.weight": (256, 256),
            "ffn_gate.weight": (512, 256), "ffn_up.weight": (512, 256), "ffn_down.weight": (256, 512),
        }  # fmt: skip
        if arch == "qwen2":
            layer |= {"attn_q.bias": (256,), "attn_k.bias": (128,), "attn_v.bias": (128,)}
        if arch == "qwen3":
            layer |= {"attn_q_norm.weight": (64,), "attn_k_norm.weight": (64,)}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random quantised data of `shape`: bytes [..., row bytes], every bit pattern possible outside the scales."""
    block, size = gguf.GGML_QUANT_SIZES[QuantType[kind]]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    first, last = SCALES[kind]
    scales = rng.normal(0, 0.1, (len(blocks), (last - first) // 2)).astype(np.float16)
    blocks[:, first:last] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    tensors: Mapping[str, tuple[str, np.ndarray]],
    *,
    arch: str = "llama",
    metadata: Mapping[str, Any] = TINY,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """`tensors`: name -> (type, data; bytes for quantised types). `metadata` keys go under `arch`, `extra` as given."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**{f"{arch}.{k}": v for k, v in metadata.items()}, **(extra or {})}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (kind, data) in tensors.items():
        if kind in ("F32", "F16"):
            writer.add_tensor(name, data.astype(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(name, data, raw_dtype=QuantType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_tiny(path: Path, *, arch: str = "llama", seed: int = 0, **options: Any) -> Path:
    """A complete little model of float32 tensors."""
    rng = np.random.default_rng(seed)
    tensors = {name: ("F32", rng.normal(0, 0.02, shape)) for name, shape in tiny_shapes(arch).items()}
    tensors |= options.pop("tensors", {})
    return write_gguf(path, tensors, arch=arch, **options)
