"""The workload that the options of `bench` describe, once the device is known."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.cli.bench_options import BenchOptions
from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.workloads import BenchRequest, nano_vllm_requests, prefix_requests, with_arrivals

# What a GPU does in seconds would keep a CPU busy for ten minutes.
GPU_SIZES = {"num_prompts": 256, "input_len": 1024, "output_len": 128}
CPU_SIZES = {"num_prompts": 32, "input_len": 128, "output_len": 64}
DEFAULT_PREFIX_LEN = 256
NANO_VLLM_TEMPERATURE = 0.6


@dataclass(frozen=True)
class Workload:
    """The options with everything decided; `requests(seed)` draws it."""

    options: BenchOptions
    num_prompts: int
    inputs: LengthRange
    outputs: LengthRange
    prefix_len: int
    num_prefixes: int
    vocab_size: int

    @classmethod
    def decide(cls, options: BenchOptions, *, on_gpu: bool, vocab_size: int) -> Workload:
        sizes = GPU_SIZES if on_gpu or options.preset else CPU_SIZES
        repeats_prefixes = options.dataset == "prefix-repetition"
        prefix_len = options.prefix_len
        return cls(
            options=options,
            num_prompts=options.num_prompts or sizes["num_prompts"],
            inputs=options.input_len or LengthRange.parse(sizes["input_len"]),
            outputs=options.output_len or LengthRange.parse(sizes["output_len"]),
            prefix_len=prefix_len if prefix_len is not None else DEFAULT_PREFIX_LEN if repeats_prefixes else 0,
            num_prefixes=options.num_prefixes if repeats_prefixes else 1,
            vocab_size=vocab_size,
        )

    @property
    def temperature(self) -> float:
        if self.options.temperature is not None:
            return self.options.temperature
        return NANO_VLLM_TEMPERATURE if self.options.preset == "nano-vllm" else 1.0

    def requests(self, seed: int, count: int | None = None) -> list[BenchRequest]:
        """`count` requests (all by default) with their arrival times."""
        count = count or self.num_prompts
        if self.options.preset == "nano-vllm":
            drawn = nano_vllm_requests(count, seed)
        else:
            drawn = prefix_requests(
                count, self.num_prefixes, self.prefix_len, self.inputs, self.outputs, self.vocab_size, seed
            )
        return with_arrivals(drawn, self.options.request_rate, self.options.burstiness, seed)

    def __str__(self) -> str:
        rate = self.options.request_rate
        pace = "all at once" if rate == float("inf") else f"{rate:g} requests/s"
        if self.options.max_concurrency is not None:
            pace += f", at most {self.options.max_concurrency} under way"
        if self.options.preset is not None:
            return f"preset {self.options.preset}: {self.num_prompts} requests, {pace}"
        prefix = f"{self.num_prefixes} x {self.prefix_len} shared + " if self.prefix_len else ""
        return f"{self.num_prompts} requests of {prefix}{self.inputs} tokens, answers of {self.outputs}, {pace}"
