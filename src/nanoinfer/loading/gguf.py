"""Imports a GGUF file, once, into the user's cache as an ordinary model folder that later starts read.

Stored types are kept where torch has them (F32, F16, BF16); quantised tensors become float32, so that float32 results
equal those of any other reader of the same file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoinfer.errors import ModelError
from nanoinfer.loading import Notify, silent
from nanoinfer.loading.cache import cache_dir, create_once, require_free
from nanoinfer.loading.gguf_file import GGUFFile, GGUFTensor, read_gguf
from nanoinfer.loading.gguf_tokenizer import tokenizer_files
from nanoinfer.loading.safetensors import write_safetensors
from nanoinfer.models.config import ARCHITECTURES, ModelConfig

if TYPE_CHECKING:
    import numpy as np

# Part of an import's key: raise it when an import of the same file would come out different.
IMPORT_VERSION = 2
_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # GGUF calls a Mistral model llama: without a window they are the same
_STORED_AS_IS = ("F32", "F16", "BF16")  # safetensors has the same names
_DEQUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's rope scaling, kept as one number per frequency
_CHUNK = 1 << 18  # elements dequantised at a time: their temporaries stay in the CPU cache


def import_gguf(path: Path, notify: Notify = silent) -> Path:
    """The model folder made from the GGUF file at `path`; made now if the cache does not have it yet.

    Reports ("import", bytes written, bytes in all). ModelError if the file is damaged or holds something that is not
    supported (architecture, tensor type, tokenizer), or if the cache cannot be written.
    """
    target = cache_dir() / "models" / f"{path.stem}-{_identity(path)}"
    if target.is_dir():
        return target
    # A file that is refused should leave nothing in the cache, not even a lock: removing that would not be safe.
    return create_once(target, prepare_import(path, notify))


def _identity(path: Path) -> str:
    """A key that changes whenever the file does: size, time of change, and a hash of both ends."""
    import xxhash

    try:
        stat = path.stat()
        digest = xxhash.xxh3_128(f"{IMPORT_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, stat.st_size - (1 << 20)))
            digest.update(file.read(1 << 20))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()[:16]


def prepare_import(path: Path, notify: Notify) -> Callable[[Path], None]:
    """Check the GGUF file at `path`, and return what writes its model into an empty folder; errors as in
    `import_gguf`."""
    file = read_gguf(path)
    config = _config(file)
    ModelConfig.from_dict(config, source=str(path))  # refuse an unsupported model before gigabytes are written
    names = _tensor_names(file)
    _check_heads(file, names, config)
    texts = {"config.json": _json(config), **tokenizer_files(file.metadata, str(path))}
    output = {}
    for name, tensor in names.items():
        kind = _type_name(tensor)
        output[name] = (kind if kind in _STORED_AS_IS else "F32", tensor.shape)
    total = sum(math.prod(shape) * (4 if dtype == "F32" else 2) for dtype, shape in output.values())

    def write(folder: Path) -> None:
        require_free(folder, total + sum(map(len, texts.values())), f"importing {path.name}")
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        write_safetensors(folder / "model.safetensors", output, _data(file, names, config, total, notify))

    return write


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that describes the same model."""
    metadata, source = file.metadata, file.path
    model_type = metadata.get("general.architecture")
    if model_type not in _MODEL_TYPES:
        raise ModelError(f"{source}: architecture '{model_type}' is not supported; {', '.join(_MODEL_TYPES)} are.")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{model_type}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{source}: {key} differs between layers, which is not supported.")
            return value[0]
        return value

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not get("attention.head_count"):
        raise ModelError(f"{source} holds no language model (no token_embd.weight or head count).")
    head_dim = get("attention.key_length") or get("embedding_length", 0) // get("attention.head_count")
    if get("attention.value_length", head_dim) != head_dim or get("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(f"{source}: heads with partial rotation or a different value size are not supported.")
    biased = [name for name in ("attn_q", "ffn_gate") if f"blk.0.{name}.bias" in file.tensors]
    theta = get("rope.freq_base", 10000.0)  # the default of the GGUF specification
    rope = _rope(file, get, theta, head_dim)
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv", get("attention.head_count")),
        "head_dim": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope,
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "attn_q" in biased,
        "mlp_bias": "ffn_gate" in biased,
        "hidden_act": "silu",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }


def _rope(file: GGUFFile, get: Any, theta: float, head_dim: int) -> dict[str, Any] | None:
    if _ROPE_FACTORS in file.tensors:
        return _llama3_rope(file, theta, head_dim)
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor") or get("rope.scale_linear", 1.0)
    if kind == "yarn":
        if get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise ModelError(f"{file.path}: yarn rope with its own attention factor is not supported.")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: rope scaling '{kind}' is not supported; none, linear and yarn are.")
    return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None


def _llama3_rope(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Recover the llama3 parameters behind the stored per-frequency factors.

    All published Llama 3.1, 3.2 and 3.3 models share low and high factor 1 and 4 and an original length of 8,192; they
    differ in the factor, which is the largest of the stored numbers. Anything else is refused.
    """
    import numpy as np

    stored = np.frombuffer(file.raw(file.tensors[_ROPE_FACTORS]), dtype="<f4").astype(np.float64)
    factor, low, high, original = float(np.round(stored.max(initial=1.0))), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise ModelError(f"{file.path}: the rope factors in {_ROPE_FACTORS} are not Llama 3's and are not supported.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _tensor_names(file: GGUFFile) -> dict[str, GGUFTensor]:
    """Hugging Face name -> tensor; ModelError that lists the tensors that have none or an unsupported type."""
    names, unknown = {}, []
    for tensor in file.tensors.values():
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", tensor.name)
        base = (_TOP_NAMES if match[1] is None else _LAYER_NAMES).get(match[2]) if match else None
        if tensor.name == _ROPE_FACTORS:
            continue
        if match is None or base is None:
            unknown.append(tensor.name)
        elif (kind := _type_name(tensor)) not in (*_STORED_AS_IS, *_DEQUANTIZED):
            unknown.append(f"{tensor.name} ({kind})")
        else:
            names[f"{'' if match[1] is None else f'model.layers.{match[1]}.'}{base}.{match[3]}"] = tensor
    if unknown:
        more = f" and {len(unknown) - 10} more" if len(unknown) > 10 else ""
        raise ModelError(f"{file.path} holds tensors that are not supported: {', '.join(unknown[:10])}{more}.")
    return names


def _check_heads(file: GGUFFile, names: Mapping[str, GGUFTensor], config: Mapping[str, Any]) -> None:
    for tensor in names.values():
        heads = _permuted_heads(tensor.name, config)
        if heads and tensor.shape[0] != heads * config["head_dim"]:
            raise ModelError(f"{file.path} is damaged: {tensor.name} has {tensor.shape[0]} rows for {heads} heads.")


def _type_name(tensor: GGUFTensor) -> str:
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.type).name)


def _data(
    file: GGUFFile, names: Mapping[str, GGUFTensor], config: Mapping[str, Any], total: int, notify: Notify
) -> Iterator[memoryview]:
    """The tensors' bytes in the order of `names`, in pieces of at most a few megabytes where they are dequantised."""
    done = 0
    notify("import", done, total)
    for tensor in names.values():
        raw = file.raw(tensor)
        heads = _permuted_heads(tensor.name, config)
        if heads:
            rows = raw.reshape(tensor.shape[0], -1)
            raw = rows[_unpermuted_rows(tensor.shape[0], heads)].reshape(-1)
        for piece in _pieces(raw, _type_name(tensor)):
            done += len(piece)
            yield piece
        notify("import", done, total)


def _pieces(raw: np.ndarray[Any, Any], kind: str) -> Iterator[memoryview]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    if kind in _STORED_AS_IS:
        yield raw.data
        return
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    step = _CHUNK // block * block_bytes
    for start in range(0, raw.size, step):
        # One long row: dequantize handles 16 rows at a time, which is slow for the rows of a small model.
        row = raw[start : start + step].reshape(1, -1)
        yield dequantize(row, GGMLQuantizationType[kind]).astype("<f4", copy=False).reshape(-1).view("u1").data


def _permuted_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Over how many heads the rows of this tensor are permuted: only q and k of the llama architecture are."""
    if config["model_type"] != "llama" or not re.search(r"\.attn_[qk]\.", name):
        return None
    return int(config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"])


def _unpermuted_rows(rows: int, heads: int) -> np.ndarray[Any, Any]:
    """Row order that undoes the interleaving of each head's two rotary halves: GGUF rotates neighbours, HF halves."""
    import numpy as np

    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
