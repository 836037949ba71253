"""What a model's config.json says, checked and normalised once: families, shapes, rope, sizes. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from nanoinfer.errors import ModelError

RopeKind = Literal["default", "linear", "llama3", "yarn"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# model_type -> architecture: the text part of a multimodal config often has only the first of the two.
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
}


def _refuse(source: str, message: str) -> NoReturn:
    raise ModelError(f"{source}: {message}")


def _given(d: Mapping[str, Any], name: str, source: str, default: float | None) -> Any:
    """The value `name` of `d`; absent or null means `default`, without one it is an error."""
    value = d.get(name)
    if value is None:
        value = default
    if value is None:
        _refuse(source, f"'{name}' is missing, so this is not a complete model configuration.")
    return value


def _whole(d: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    """The positive integer `name` of `d`."""
    value = _given(d, name, source, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(source, f"'{name}' is {value!r}; it must be a whole number of at least 1.")
    return value


def _positive(d: Mapping[str, Any], name: str, source: str, default: float | None = None) -> float:
    """The positive finite number `name` of `d`."""
    value = _given(d, name, source, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
        _refuse(source, f"'{name}' is {value!r}; it must be a number above 0.")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, normalised from every place where config.json files keep it.

    `factor` stretches the context (linear, llama3, yarn); `original_max_position_embeddings` is the length before
    stretching (llama3, yarn). `attention_factor` scales cos and sin; it is final, yarn's mscale fields are already in
    it, and 1 for the other kinds. yarn: https://arxiv.org/abs/2309.00071; llama3: the Llama 3.1 model card.
    """

    kind: RopeKind = "default"
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, source: str) -> RopeConfig:
        """Read rope from `rope_scaling`, `rope_parameters` or the top level of a config.

        transformers >= 5 writes {"rope_type": "default", "rope_theta": ...} where older files have null; both mean
        the same. ModelError for a kind that is not implemented, and for a theta that stands nowhere.
        """
        params = d.get("rope_scaling") or d.get("rope_parameters") or {}
        if not isinstance(params, Mapping):
            _refuse(source, f"the rope parameters are {params!r}; they must be an object.")
        if isinstance(params.get("full_attention"), Mapping):
            params = params["full_attention"]
        kind = params.get("rope_type") or params.get("type") or "default"
        places = (params, d.get("rope_parameters") or {}, d)
        thetas = [place["rope_theta"] for place in places if place.get("rope_theta") is not None]
        if not thetas:
            _refuse(source, "'rope_theta' is in none of rope_parameters, rope_scaling and the top level.")
        theta = _positive({"rope_theta": thetas[0]}, "rope_theta", source)
        partial = params.get("partial_rotary_factor", d.get("partial_rotary_factor"))
        if partial not in (None, 1):
            _refuse(source, f"partial_rotary_factor {partial} is not supported; only fully rotated heads are.")
        if kind == "default":
            return cls(theta=theta)
        if kind == "linear":
            return cls(kind="linear", theta=theta, factor=_positive(params, "factor", source))
        # Some files keep the original length beside rope_scaling; that place wins, as in transformers.
        longest = _whole(d, "max_position_embeddings", source)
        inside = _whole(params, "original_max_position_embeddings", source, longest)
        original = _whole(d, "original_max_position_embeddings", source, inside)
        if kind == "llama3":
            return cls(
                kind="llama3",
                theta=theta,
                factor=_positive(params, "factor", source),
                original_max_position_embeddings=original,
                low_freq_factor=_positive(params, "low_freq_factor", source),
                high_freq_factor=_positive(params, "high_freq_factor", source),
            )
        if kind == "yarn":
            return cls._yarn(params, theta, original, longest, source)
        _refuse(source, f"rope type '{kind}' is not supported; supported are default, linear, llama3 and yarn.")

    @classmethod
    def _yarn(cls, p: Mapping[str, Any], theta: float, original: int, longest: int, source: str) -> RopeConfig:
        factor = _positive(p, "factor", source, longest / original)

        def magnitude(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

        if p.get("mscale") and p.get("mscale_all_dim"):
            attention = magnitude(p["mscale"]) / magnitude(p["mscale_all_dim"])
        else:
            attention = magnitude(1.0)
        return cls(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_positive(p, "beta_fast", source, 32.0),
            beta_slow=_positive(p, "beta_slow", source, 1.0),
            truncate=bool(p.get("truncate", True)),
            attention_factor=_positive(p, "attention_factor", source, attention),
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and switches of one decoder-only model.

    `max_position_embeddings` is the longest sequence that is computed exactly: where a Mistral model attends through a
    sliding window, it is that window (up to there full attention gives the same result). `o_bias` and `mlp_bias`
    follow Llama's attention_bias and mlp_bias. `dtype` is the checkpoint's own, None where the file does not say.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], *, source: str) -> ModelConfig:
        """Parse the content of a config.json; `source` names the file in errors.

        ModelError if a needed field is missing or wrong, or if the model needs something that is not implemented.
        """
        d = unwrap_text_config(d)
        architecture = _architecture(d, source)
        _refuse_unsupported(d, source)
        hidden, heads = _whole(d, "hidden_size", source), _whole(d, "num_attention_heads", source)
        kv_heads = _whole(d, "num_key_value_heads", source, heads)
        if heads % kv_heads:
            _refuse(source, f"{heads} attention heads cannot share {kv_heads} key-value heads evenly.")
        if d.get("head_dim") is None and hidden % heads:
            _refuse(source, f"hidden_size {hidden} is not a multiple of {heads} heads, and head_dim is not given.")
        head_dim = _whole(d, "head_dim", source, hidden // heads)
        if head_dim % 2:
            _refuse(source, f"head_dim is {head_dim}; rotary embeddings need an even number.")
        # Llama and Qwen3 switch all four attention biases together; Qwen2 always has three, Mistral none.
        attention_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and bool(d.get("attention_bias"))
        dtype = str(d.get("dtype") or d.get("torch_dtype")).removeprefix("torch.")
        return cls(
            architecture=architecture,
            vocab_size=_whole(d, "vocab_size", source),
            hidden_size=hidden,
            intermediate_size=_whole(d, "intermediate_size", source),
            num_layers=_whole(d, "num_hidden_layers", source),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive(d, "rms_norm_eps", source),
            rope=RopeConfig.from_dict(d, source=source),
            max_position_embeddings=_longest_exact(d, architecture, source),
            tie_word_embeddings=bool(d.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "Qwen2ForCausalLM" or attention_bias,
            o_bias=attention_bias,
            mlp_bias=architecture == "LlamaForCausalLM" and bool(d.get("mlp_bias")),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=dtype if dtype in DTYPE_BYTES else None,
        )

    def kv_heads_per_rank(self, tp: int = 1) -> int:
        """KV heads in one rank's cache: split while there are enough, repeated below that (`Partition.kv_copies`)."""
        queries = self.num_heads // tp
        return queries // math.gcd(queries, self.num_heads // self.num_kv_heads)

    def num_parameters(self, tp: int = 1) -> int:
        """Parameters that one rank stores; with `tp` 1, the whole model's. Tied embeddings count once.

        Norms and the biases of row-parallel layers are on every rank; the vocabulary is cut into equal padded shards.
        """
        hidden, inner, q = self.hidden_size, -(-self.intermediate_size // tp), self.num_heads // tp * self.head_dim
        kv = self.kv_heads_per_rank(tp) * self.head_dim
        attention = hidden * (q + 2 * kv) + q * hidden
        attention += self.qkv_bias * (q + 2 * kv) + self.o_bias * hidden + self.qk_norm * 2 * self.head_dim
        mlp = 3 * hidden * inner + self.mlp_bias * (2 * inner + hidden)
        embeddings = -(-self.vocab_size // tp) * hidden * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * (attention + mlp + 2 * hidden) + hidden

    def weight_bytes(self, dtype: str, tp: int = 1) -> int:
        """Bytes of one rank's weights stored as `dtype` ("float32", "bfloat16" or "float16")."""
        return self.num_parameters(tp) * DTYPE_BYTES[dtype]

    def kv_bytes_per_token(self, dtype_bytes: int, tp: int = 1) -> int:
        """Bytes of keys and values that one token takes on one rank, over all layers."""
        return 2 * self.num_layers * self.kv_heads_per_rank(tp) * self.head_dim * dtype_bytes


def token_ids(value: object) -> tuple[int, ...]:
    """An id field of a config as a tuple: an id, a list of ids, or null (no id)."""
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def unwrap_text_config(d: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config; any other config unchanged."""
    text = d.get("text_config")
    if not isinstance(text, Mapping):
        return d
    shared = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config")
    return {**{name: d[name] for name in shared if name in d}, **text}


def _architecture(d: Mapping[str, Any], source: str) -> str:
    names = d.get("architectures") or [ARCHITECTURES.get(str(d.get("model_type")), d.get("model_type"))]
    if isinstance(names, str):
        names = [names]
    for name in names:
        if name in ARCHITECTURES.values():
            return str(name)
    supported = ", ".join(sorted(ARCHITECTURES.values()))
    if names == [None]:
        _refuse(source, f"it names no architecture, so this is no language model's config; supported are {supported}.")
    _refuse(source, f"architecture {', '.join(map(str, names))} is not supported; supported are {supported}.")


def _refuse_unsupported(d: Mapping[str, Any], source: str) -> None:
    activation = d.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        _refuse(source, f"activation '{activation}' is not supported; only silu is.")
    quantization = d.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        _refuse(source, f"weights quantised with '{method}' are not supported; use the model's unquantised version.")


def _longest_exact(d: Mapping[str, Any], architecture: str, source: str) -> int:
    """The longest sequence for which full attention computes what the model was trained to compute."""
    longest = _whole(d, "max_position_embeddings", source)
    layer_types = d.get("layer_types") or []
    other = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if other:
        _refuse(source, f"layers of type '{other[0]}' are not supported.")
    if d.get("sliding_window") is None or architecture == "LlamaForCausalLM":
        return longest
    window = _whole(d, "sliding_window", source)
    if architecture == "MistralForCausalLM":
        return min(longest, window)
    # Qwen keeps a window in the file and switches it on, for the upper layers, with a second field.
    first = _whole(d, "max_window_layers", source, 28) if d.get("max_window_layers") != 0 else 0
    slides = "sliding_attention" in layer_types if layer_types else first < _whole(d, "num_hidden_layers", source)
    if d.get("use_sliding_window") and slides and window < longest:
        _refuse(source, f"sliding-window attention (use_sliding_window with {window} tokens) is not supported.")
    return longest
