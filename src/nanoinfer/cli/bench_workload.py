"""The workload that the options of `bench` describe, once the device is known."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanoinfer.cli.bench_options import BenchOptions
from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.workload_files import (
    Encode,
    custom_requests,
    read_custom,
    read_sharegpt,
    read_trace,
    sharegpt_requests,
    trace_requests,
)
from nanoinfer.cli.workloads import BenchRequest, nano_vllm_requests, prefix_requests, with_arrivals
from nanoinfer.errors import UserError
from nanoinfer.ui.text import plural

# What a GPU does in seconds would keep a CPU busy for ten minutes.
GPU_SIZES = {"num_prompts": 256, "input_len": 1024, "output_len": 128}
CPU_SIZES = {"num_prompts": 32, "input_len": 128, "output_len": 64}
DEFAULT_PREFIX_LEN = 256
NANO_VLLM_TEMPERATURE = 0.6

_READERS: dict[str, Any] = {"sharegpt": read_sharegpt, "custom": read_custom, "trace": read_trace}


def read_dataset(options: BenchOptions) -> list[Any] | None:
    """The content of --dataset-path, None for workloads that are drawn; UserError before anything slow happens."""
    if options.dataset not in _READERS:
        return None
    assert options.dataset_path is not None, options
    entries: list[Any] = _READERS[options.dataset](options.dataset_path)
    return entries


@dataclass(frozen=True)
class Workload:
    """The options with everything decided; `requests` draws it."""

    options: BenchOptions
    num_prompts: int
    inputs: LengthRange
    outputs: LengthRange
    prefix_len: int
    num_prefixes: int
    vocab_size: int
    entries: list[Any]  # of --dataset-path
    encode: Encode

    @classmethod
    def decide(
        cls, options: BenchOptions, entries: list[Any] | None, encode: Encode, *, on_gpu: bool, vocab_size: int
    ) -> Workload:
        sizes = GPU_SIZES if on_gpu or options.preset else CPU_SIZES
        repeats_prefixes = options.dataset == "prefix-repetition"
        prefix_len = options.prefix_len
        all_of_it = len(entries or ()) if options.dataset in ("custom", "trace") else None
        if all_of_it is not None and (options.num_prompts or 0) > all_of_it:
            raise UserError(
                f"{options.dataset_path} has {plural(all_of_it, 'request')}; lower --num-prompts to that, or less."
            )
        return cls(
            options=options,
            num_prompts=options.num_prompts or all_of_it or sizes["num_prompts"],
            inputs=options.input_len or LengthRange.parse(sizes["input_len"]),
            outputs=options.output_len or LengthRange.parse(sizes["output_len"]),
            prefix_len=prefix_len if prefix_len is not None else DEFAULT_PREFIX_LEN if repeats_prefixes else 0,
            num_prefixes=options.num_prefixes if repeats_prefixes else 1,
            vocab_size=vocab_size,
            entries=entries or [],
            encode=encode,
        )

    @property
    def temperature(self) -> float:
        if self.options.temperature is not None:
            return self.options.temperature
        return NANO_VLLM_TEMPERATURE if self.options.preset == "nano-vllm" else 1.0

    def requests(self, seed: int, count: int, rate: float = math.inf) -> list[BenchRequest]:
        """`count` requests that arrive `rate` times a second; a trace has its own arrivals."""
        drawn = self._draw(seed, count)
        if len(drawn) < count:
            raise UserError(
                f"{self.options.dataset_path} has only {plural(len(drawn), 'conversation')} of a usable length, "
                f"fewer than the {count} asked for; lower --num-prompts."
            )
        return with_arrivals(drawn, rate, self.options.burstiness, seed)

    def _draw(self, seed: int, count: int) -> list[BenchRequest]:
        if self.options.preset == "nano-vllm":
            return nano_vllm_requests(count, seed)
        match self.options.dataset:
            case "sharegpt":
                return sharegpt_requests(self.entries, count, self.options.output_len, self.encode, seed)
            case "custom":
                return custom_requests(self.entries, count, self.outputs, self.encode, seed)
            case "trace":
                return trace_requests(self.entries, count, self.vocab_size, seed)
        return prefix_requests(
            count, self.num_prefixes, self.prefix_len, self.inputs, self.outputs, self.vocab_size, seed
        )

    def facts(self) -> dict[str, Any]:
        """What makes two runs the same workload, by the options' names; the requests' digest comes beside it."""
        options = self.options
        drawn = options.preset is None and not self.entries
        return {
            "dataset": options.preset or options.dataset,
            "dataset_file": options.dataset_path.name if options.dataset_path else None,
            "input_len": str(self.inputs) if drawn else None,
            "output_len": str(self.outputs) if drawn or options.output_len else None,
            "prefix_len": self.prefix_len,
            "num_prefixes": self.num_prefixes,
            "temperature": self.temperature,
        }

    def __str__(self) -> str:
        options, requests = self.options, plural(self.num_prompts, "request")
        if options.preset is not None:
            return f"preset {options.preset}: {requests}"
        if options.dataset_path is not None:
            own_arrivals = ", each at its time" if options.dataset == "trace" else ""
            return f"{requests} of {options.dataset} file {options.dataset_path.name}{own_arrivals}"
        prefix = f"{self.num_prefixes} x {self.prefix_len} shared + " if self.prefix_len else ""
        tokens = "token" if self.inputs.high == 1 else "tokens"
        return f"{requests} of {prefix}{self.inputs} {tokens}, answers of {self.outputs}"


def pace(rate: float, limit: int | None) -> str:
    """How requests are sent, as the end of a sentence about the workload."""
    texts = [] if math.isinf(rate) else [f"{rate:g} requests/s"]
    texts += [] if limit is None else [f"at most {limit} under way"]
    return ", ".join(texts) or "all at once"


def digest(requests: Sequence[BenchRequest]) -> str:
    """Sixteen hexadecimal digits that stand for every token, output length and arrival of a workload."""
    hasher = hashlib.sha256()
    for request in requests:
        hasher.update(array("q", [len(request.token_ids), *request.token_ids, request.output_tokens]).tobytes())
        hasher.update(repr(request.arrival).encode())
    return hasher.hexdigest()[:16]
