"""The options of `bench`."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.options import ProfileFolder, option_in
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError

WORKLOAD, LOAD = "Workload", "Load and measurement"

Dataset = Literal["random", "prefix-repetition", "sharegpt", "custom", "trace"]
Preset = Literal["nano-vllm"]
OutputFormat = Literal["table", "md", "json", "csv"]


def parse_length(value: str | int) -> LengthRange:
    """An option's `512` or `100:1024`."""
    try:
        return LengthRange.parse(value)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def parse_warmup(value: str | int) -> int | None:
    """A number of requests, or None for auto."""
    if str(value) == "auto":
        return None
    if str(value).isdecimal():
        return int(value)
    raise typer.BadParameter(f"{value!r} is neither a number of requests nor auto")


@dataclass(frozen=True)
class Sweep:
    """Levels to measure one after the other; None is every power of two up to what the engine runs at a time."""

    over: Literal["concurrency", "rate"]
    levels: tuple[float, ...] | None


def parse_sweep(value: str) -> Sweep:
    """`auto`, `1,2,4` (requests under way) or `rate:0.5,1,2` (arrivals per second)."""
    if value == "auto":
        return Sweep("concurrency", None)
    kind, colon, numbers = value.rpartition(":")
    try:
        levels = tuple(sorted({float(number) for number in numbers.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a sweep; write 1,2,4,8 or rate:0.5,1,2 or auto") from None
    if colon and kind not in ("rate", "concurrency"):
        raise typer.BadParameter(f"{kind!r} cannot be swept; concurrency and rate can")
    over: Literal["concurrency", "rate"] = "rate" if kind == "rate" else "concurrency"
    whole = over == "rate" or all(level.is_integer() for level in levels)
    if not whole or not all(0 < level < math.inf for level in levels):
        raise typer.BadParameter(f"{value!r}: the levels must be above 0, and whole for concurrency")
    return Sweep(over, levels)


@dataclass(frozen=True)
class BenchOptions:
    """The options as given; None is decided when the device is known."""

    dataset: Dataset
    dataset_path: Path | None
    preset: Preset | None
    num_prompts: int | None
    input_len: LengthRange | None
    output_len: LengthRange | None
    prefix_len: int | None
    num_prefixes: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    sweep: Sweep | None
    warmup: int | None
    repeat: int
    temperature: float | None
    goodput: str
    slo_attainment: float | None
    profile: Path | None = None

    def __post_init__(self) -> None:
        for name in ("num_prompts", "num_prefixes", "max_concurrency", "repeat"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} is {value}; it must be at least 1.")
        if self.prefix_len is not None and self.prefix_len < 0:
            raise UserError(f"--prefix-len is {self.prefix_len}; it must be at least 0.")
        for name in ("request_rate", "burstiness"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be above 0.")
        if self.temperature is not None:
            SamplingParams(temperature=self.temperature)  # ConfigError
        if self.slo_attainment is not None and not self.goodput:
            raise UserError("--slo-attainment needs limits to attain; add --goodput ttft:200 tpot:50, for example.")
        if self.slo_attainment is not None and not 0 < self.slo_attainment <= 1:
            raise UserError(f"--slo-attainment is {self.slo_attainment}; it must be above 0 and at most 1.")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        lengths = self.input_len or self.prefix_len is not None
        from_file = self.dataset in ("sharegpt", "custom", "trace")
        if self.preset is not None and (lengths or self.output_len):
            raise UserError("--preset fixes the lengths; leave --input-len, --output-len and --prefix-len out.")
        if self.preset is not None and self.dataset != "random":
            raise UserError("--preset is a workload of its own; leave --dataset out.")
        if from_file and self.dataset_path is None:
            raise UserError(f"--dataset {self.dataset} needs the file: add --dataset-path FILE.")
        if not from_file and self.dataset_path is not None:
            raise UserError("--dataset-path belongs to --dataset sharegpt, custom or trace; add one of them.")
        if from_file and (lengths or (self.dataset == "trace" and self.output_len)):
            raise UserError(f"the lengths of --dataset {self.dataset} come from its file; leave the options out.")
        rate_is_set = not math.isinf(self.request_rate)
        if self.dataset == "trace" and (rate_is_set or (self.sweep and self.sweep.over == "rate")):
            raise UserError("a trace has its own arrival times; leave --request-rate and rate sweeps out.")
        if self.sweep and self.max_concurrency is not None:
            raise UserError("--sweep sets the load itself; leave --max-concurrency out.")
        if self.sweep and self.sweep.over == "rate" and rate_is_set:
            raise UserError("a --sweep over rates sets the load itself; leave --request-rate out.")


_workload = partial(option_in, WORKLOAD)
_load = partial(option_in, LOAD)


def bench_options(
    dataset: Annotated[
        Dataset, _workload("--dataset", help="Where prompts, lengths and arrivals come from.")
    ] = "random",
    dataset_path: Annotated[
        Path | None,
        _workload("--dataset-path", metavar="FILE", help="ShareGPT's JSON, custom JSONL or a JSONL trace."),
    ] = None,
    preset: Annotated[Preset | None, _workload("--preset", help="A workload with published figures.")] = None,
    num_prompts: Annotated[
        int | None, _workload("--num-prompts", metavar="N", help="Requests.  [default: 256; 32 on a CPU]")
    ] = None,
    input_len: Annotated[
        LengthRange | None,
        _workload(
            "--input-len",
            parser=parse_length,
            metavar="N|A:B",
            help="Prompt tokens, after a shared prefix.  [default: 1024; 128 on a CPU]",
        ),
    ] = None,
    output_len: Annotated[
        LengthRange | None,
        _workload(
            "--output-len", parser=parse_length, metavar="N|A:B", help="Answer tokens.  [default: 128; 64 on a CPU]"
        ),
    ] = None,
    prefix_len: Annotated[
        int | None,
        _workload("--prefix-len", metavar="N", help="Shared tokens before each prompt.  [prefix-repetition: 256]"),
    ] = None,
    num_prefixes: Annotated[
        int, _workload("--num-prefixes", metavar="N", help="Different prefixes of prefix-repetition.")
    ] = 10,
    temperature: Annotated[
        float | None, _workload("--temperature", help="Of the sampling.  [default: 1; 0.6 with nano-vllm]")
    ] = None,
    request_rate: Annotated[
        float, _load("--request-rate", metavar="R", help="Arrivals per second; inf sends all at once.")
    ] = float("inf"),
    burstiness: Annotated[
        float, _load("--burstiness", metavar="B", help="1 is a Poisson process, less comes in bursts.")
    ] = 1.0,
    max_concurrency: Annotated[
        int | None, _load("--max-concurrency", metavar="N", help="Requests under way at the same time.")
    ] = None,
    sweep: Annotated[
        Sweep | None,
        _load(
            "--sweep",
            parser=parse_sweep,
            metavar="LEVELS",
            help="Measure 1,2,4 requests under way (or auto, or rate:1,2,4).",
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        _load("--warmup", parser=parse_warmup, metavar="N|auto", help="Requests before, of another seed; not counted."),
    ] = None,
    repeat: Annotated[int, _load("--repeat", metavar="N", help="Runs; the cache is emptied before each.")] = 1,
    goodput: Annotated[
        str, _load("--goodput", metavar="SLO...", help="Limits in ms on ttft, tpot, e2el, itl_p99: ttft:200 tpot:50.")
    ] = "",
    slo_attainment: Annotated[
        float | None, _load("--slo-attainment", metavar="P", help="Exit code 4 if fewer requests keep all limits.")
    ] = None,
    profile: ProfileFolder = None,
) -> BenchOptions:
    return BenchOptions(
        dataset=dataset,
        dataset_path=dataset_path,
        preset=preset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        sweep=sweep,
        warmup=warmup,
        repeat=repeat,
        temperature=temperature,
        goodput=goodput,
        slo_attainment=slo_attainment,
        profile=profile,
    )
