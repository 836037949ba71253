"""The options of `bench`."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import typer

from nanoinfer.cli.lengths import LengthRange
from nanoinfer.errors import UserError

WORKLOAD, LOAD = "Workload", "Load and measurement"

Dataset = Literal["random", "prefix-repetition"]
Preset = Literal["nano-vllm"]


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
class BenchOptions:
    """The options as given; None is decided when the device is known."""

    dataset: Dataset
    preset: Preset | None
    num_prompts: int | None
    input_len: LengthRange | None
    output_len: LengthRange | None
    prefix_len: int | None
    num_prefixes: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    warmup: int | None
    repeat: int
    temperature: float | None
    goodput: str
    slo_attainment: float | None

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
        if self.slo_attainment is not None and not self.goodput:
            raise UserError("--slo-attainment needs limits to attain; add --goodput ttft:200 tpot:50, for example.")
        if self.slo_attainment is not None and not 0 < self.slo_attainment <= 1:
            raise UserError(f"--slo-attainment is {self.slo_attainment}; it must be above 0 and at most 1.")
        if self.preset is not None and (self.input_len or self.output_len or self.prefix_len is not None):
            raise UserError("--preset fixes the lengths; leave --input-len, --output-len and --prefix-len out.")


def _workload(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=WORKLOAD, **more)


def _load(*names: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=LOAD, **more)


def bench_options(
    dataset: Annotated[Dataset, _workload("--dataset", help="Kind of prompts; token ids are random.")] = "random",
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
) -> BenchOptions:
    return BenchOptions(
        dataset=dataset,
        preset=preset,
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        warmup=warmup,
        repeat=repeat,
        temperature=temperature,
        goodput=goodput,
        slo_attainment=slo_attainment,
    )
