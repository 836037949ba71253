"""What a user can choose: EngineConfig for the engine, SamplingParams for a request. Frozen and validated."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self, cast, get_args

from nanoinfer.errors import ConfigError

SchedulePolicy = Literal["mixed", "prefill-first"]
AttentionChoice = Literal["auto", "flash-attn", "triton", "torch"]  # numba's comes with its kernels
KernelChoice = Literal["auto", "triton", "numba", "cpu", "compiled", "eager"]
DtypeChoice = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]

DEFAULT_MAX_TOKENS = 512  # of an answer, where neither the model nor the user says anything
MAX_COUNT = 2**31 - 1  # of tokens: counts are kept as 32-bit integers
MAX_SEED = 2**62  # sample i uses seed + i, and seeds are kept as 64-bit integers


def reject_unknown(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Raise ConfigError for the first name in `given` that is not in `known`, with the nearest known name."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(sorted(known))}."
            raise ConfigError(f"unknown {what} '{name}'; {hint}")


def _check(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must be {rule}.")


def _plain(value: object) -> object:
    """A number of numpy's or torch's as Python's, a path as text; anything else as it is."""
    if getattr(value, "ndim", None) == 0:
        return cast(Any, value).item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


_PLAIN = (int, float, bool, str, tuple, type(None))


def _make_plain(options: Any) -> None:
    """The fields of a frozen dataclass as `_plain` makes them."""
    for name, value in list(vars(options).items()):
        if type(value) not in _PLAIN:
            object.__setattr__(options, name, _plain(value))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_int(value) and 0 <= cast(int, value) <= MAX_COUNT


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Options of the engine, under the long names of the command line. None means: decided by the engine.

    `max_num_batched_tokens` counts prefill and decode tokens of one step; `max_model_len` counts prompt and output
    tokens of one sequence; `num_blocks` overrides the KV budget; `kv_memory` is that budget in bytes; `tp_timeout` is
    how many seconds the ranks of tensor parallelism wait for each other. `model_named` is no option but says who named
    `model`, for the line that says which model was chosen and why.
    """

    model: str | None = None
    model_named: str = "as asked for"
    revision: str | None = None
    load_format: LoadFormat = "auto"
    dtype: DtypeChoice = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    tp_timeout: float = 120.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_prefill_chunk: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    kv_memory: int | None = None
    gpu_memory_utilization: float = 0.90
    enable_prefix_caching: bool = True
    schedule: SchedulePolicy = "mixed"
    enforce_eager: bool = False
    attention: AttentionChoice = "auto"
    kernels: KernelChoice = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        _make_plain(self)
        for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens"):
            value = getattr(self, name)
            _check(_is_int(value) and value >= 1, name, value, "a whole number of at least 1")
        for name in ("max_prefill_chunk", "max_model_len", "block_size", "num_blocks", "kv_memory"):
            value = getattr(self, name)
            _check(value is None or (_is_int(value) and value >= 1), name, value, "a whole number of at least 1")
        _check(_is_int(self.seed) and self.seed >= 0, "seed", self.seed, "a whole number of at least 0")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}); "
                "every running sequence needs one token of a step: raise the first or lower the second."
            )
        utilization = self.gpu_memory_utilization
        timeout = self.tp_timeout
        _check(_is_number(timeout) and timeout > 0, "tp_timeout", timeout, "a number of seconds above 0")
        in_range = _is_number(utilization) and 0.0 < utilization <= 1.0
        _check(in_range, "gpu_memory_utilization", utilization, "above 0 and at most 1")
        for name, choices in (
            ("schedule", SchedulePolicy),
            ("attention", AttentionChoice),
            ("kernels", KernelChoice),
            ("dtype", DtypeChoice),
            ("load_format", LoadFormat),
        ):
            value = getattr(self, name)
            _check(value in get_args(choices), name, value, "one of " + ", ".join(get_args(choices)))
        for name in ("enable_prefix_caching", "enforce_eager"):
            _check(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        for name in ("model", "model_named", "revision"):
            value = getattr(self, name)
            _check(value is None or isinstance(value, str), name, value, "text")
        _check(isinstance(self.device, str), "device", self.device, "auto, cpu, cuda or cuda:N")
        device_ok = self.device in ("auto", "cpu", "cuda") or (
            self.device.startswith("cuda:") and self.device[5:].isdecimal()
        )
        _check(device_ok, "device", self.device, "auto, cpu, cuda or cuda:N")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build a config from a mapping; ConfigError for an unknown option or a value out of range."""
        reject_unknown(options, (f.name for f in fields(cls)), "engine option")
        return cls(**options)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it stops. The names are OpenAI's and vLLM's.

    temperature 0 is greedy; `top_k` 0 and `top_p` 1 and `min_p` 0 are off; penalties of 1 (repetition) or 0 (presence,
    frequency) are off; `logprobs` k reports the sampled token's and the k most likely tokens' log probabilities;
    `n` samples share the prompt, sample i uses `seed` + i. `max_tokens` None means up to the model's length.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _make_plain(self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, ())
            elif isinstance(value, list):
                object.__setattr__(self, name, tuple(map(_plain, value)))
            else:
                _check(isinstance(value, tuple), name, value, "a list")
        if self.top_k == -1:  # the other common way to say "off"
            object.__setattr__(self, "top_k", 0)
        _check(_is_int(self.n) and 1 <= self.n <= 256, "n", self.n, "a whole number from 1 to 256")
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            value = getattr(self, name)
            _check(_is_number(value) and low <= value <= high, name, value, f"a number from {low:g} to {high:g}")
        _check(_is_count(self.top_k), "top_k", self.top_k, f"a whole number from 0 to {MAX_COUNT} (0 is off)")
        _check(_is_number(self.top_p) and 0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1")
        # Logits are multiplied by it or divided by it: at the ends of float32 nothing would be left of them.
        repetition = self.repetition_penalty
        repetition_ok = _is_number(repetition) and 0.01 <= repetition <= 100.0
        _check(repetition_ok, "repetition_penalty", repetition, "a number from 0.01 to 100 (1 is off)")
        seed_ok = self.seed is None or (_is_int(self.seed) and 0 <= self.seed <= MAX_SEED)
        _check(seed_ok, "seed", self.seed, f"a whole number from 0 to {MAX_SEED}")
        limit_ok = self.max_tokens is None or (_is_count(self.max_tokens) and self.max_tokens >= 1)
        _check(limit_ok, "max_tokens", self.max_tokens, f"a whole number from 1 to {MAX_COUNT}")
        _check(_is_count(self.min_tokens), "min_tokens", self.min_tokens, f"a whole number from 0 to {MAX_COUNT}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens}).")
        strings_ok = all(isinstance(text, str) and text for text in self.stop)
        _check(strings_ok, "stop", list(self.stop), "a list of non-empty strings")
        ids_ok = all(_is_int(token) and token >= 0 for token in self.stop_token_ids)
        _check(ids_ok, "stop_token_ids", list(self.stop_token_ids), "a list of token ids")
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "true or false")
        top_ok = self.logprobs is None or (_is_int(self.logprobs) and 0 <= self.logprobs <= 20)
        _check(top_ok, "logprobs", self.logprobs, "a whole number from 0 to 20")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Build params from a mapping; ConfigError for an unknown name or a value out of range."""
        reject_unknown(options, (f.name for f in fields(cls)), "sampling parameter")
        return cls(**options)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        """A copy with some parameters replaced; ConfigError as in `from_options`."""
        reject_unknown(options, (f.name for f in fields(self)), "sampling parameter")
        return replace(self, **options)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
