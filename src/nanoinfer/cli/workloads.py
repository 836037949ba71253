"""Benchmark workloads: prompts as token ids, output lengths and arrival times, all from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nanoinfer.cli.lengths import LengthRange
from nanoinfer.errors import UserError


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload; `arrival` in seconds after the start, None where it is sent as soon as it may."""

    token_ids: list[int]
    output_tokens: int
    arrival: float | None = None


def nano_vllm_requests(num_prompts: int = 256, seed: int = 0) -> list[BenchRequest]:
    """nano-vllm's bench.py: prompts and outputs uniform in 100..1024 tokens, ids uniform in 0..10000.

    The draws must come in this order (all prompts, then all output lengths) for the figures to be comparable: with
    256 prompts and seed 0 these are 142,827 prompt tokens and 133,966 output tokens.
    """
    rng = random.Random(seed)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(num_prompts)]
    return [BenchRequest(prompt, rng.randint(100, 1024)) for prompt in prompts]


def prefix_requests(
    num_prompts: int,
    num_prefixes: int,
    prefix_len: int,
    inputs: LengthRange,
    outputs: LengthRange,
    vocab_size: int,
    seed: int,
) -> list[BenchRequest]:
    """Prompts that share prefixes: one of `num_prefixes` random ones, then `inputs` random tokens, in random order.

    A `prefix_len` of 0 makes them independent.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prefixes = [tokens(prefix_len) for _ in range(num_prefixes)]
    requests = [
        BenchRequest(
            prefixes[i % num_prefixes] + tokens(rng.randint(inputs.low, inputs.high)),
            rng.randint(outputs.low, outputs.high),
        )
        for i in range(num_prompts)
    ]
    rng.shuffle(requests)
    return requests


def arrival_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds of an open loop: gamma intervals (burstiness 1 is a Poisson process, less is burstier),
    scaled so that the last request arrives at count / rate and the mean rate is exactly `rate`."""
    rng = random.Random(seed)
    moment, times = 0.0, []
    for _ in range(count):
        moment += rng.gammavariate(burstiness, 1.0 / burstiness)
        times.append(moment)
    scale = count / rate / moment if moment > 0 else 0.0
    return [time * scale for time in times]


def with_arrivals(requests: list[BenchRequest], rate: float, burstiness: float, seed: int) -> list[BenchRequest]:
    """The requests with arrival times; unchanged at an infinite rate."""
    if rate == float("inf"):
        return requests
    times = arrival_times(len(requests), rate, burstiness, seed)
    pairs = zip(requests, times, strict=True)
    return [BenchRequest(request.token_ids, request.output_tokens, time) for request, time in pairs]


def check_fits(requests: list[BenchRequest], max_model_len: int) -> None:
    """UserError if a request is longer than the model takes: a benchmark that drops requests measures nothing."""
    longest = max(len(request.token_ids) + request.output_tokens for request in requests)
    if longest > max_model_len:
        raise UserError(
            f"the longest request has {longest} tokens, prompt and output, but this engine takes {max_model_len}; "
            "lower --input-len or --output-len, or raise --max-model-len and the KV memory."
        )
