"""Options that several commands share, each declared once: the model, the engine, sampling and the display.

The functions below are *providers*: a command that has a parameter annotated EngineConfig gets the options of
`engine_options` in its place, and is called with what that function returns (see command.py).
"""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nanoinfer.config import (
    AttentionChoice,
    DtypeChoice,
    EngineConfig,
    KernelChoice,
    LoadFormat,
    SamplingParams,
    SchedulePolicy,
)
from nanoinfer.errors import ConfigError
from nanoinfer.ui.plain import UiChoice

MODEL, ENGINE, SAMPLING, DISPLAY = "Model", "Engine", "Sampling", "Display and logs"

ThinkChoice = Literal["auto", "on", "off"]
ThinkingDisplay = Literal["show", "hide"]
OnError = Literal["record", "skip", "fail"]
Order = Literal["input", "completion"]

# Who named the model, by the source that typer names; anything else is the command line.
_MODEL_NAMED = {"ENVIRONMENT": "from NANOINFER_MODEL", "DEFAULT_MAP": "from the configuration file"}


def thinking_options(think: ThinkChoice) -> dict[str, Any]:
    """The chat template's variables for --think; auto leaves the choice to the template."""
    return {} if think == "auto" else {"enable_thinking": think == "on"}


def whole_or_auto(value: str | int) -> int | None:
    """`auto` (decided by the engine) or a whole number."""
    if str(value) == "auto":
        return None
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a whole number nor auto") from None


def memory_size(value: str | int) -> int:
    """Bytes, written like 16GiB or 800M."""
    from nanoinfer.ui.text import parse_bytes

    try:
        return parse_bytes(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def option_in(panel: str, *names: str, help: str, **more: Any) -> Any:
    """An option that --help shows in this panel."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


_model = partial(option_in, MODEL)
_engine = partial(option_in, ENGINE)
_sampling = partial(option_in, SAMPLING)
_display = partial(option_in, DISPLAY)


ProfileFolder = Annotated[
    Path | None,
    typer.Option("--profile", metavar="DIR", help="Trace some steps into a file there, for a trace viewer."),
]


def engine_options(
    ctx: typer.Context,
    model_argument: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder, .gguf file or Hugging Face id.", rich_help_panel=MODEL, show_default=False
        ),
    ] = None,
    model: Annotated[str | None, _model("-m", "--model", help="The same, as an option.")] = None,
    revision: Annotated[str | None, _model("--revision", help="Branch, tag or commit on the hub.")] = None,
    load_format: Annotated[
        LoadFormat, _model("--load-format", help="dummy: random weights, for speed tests.")
    ] = EngineConfig.load_format,
    dtype: Annotated[DtypeChoice, _model("--dtype", help="Precision of weights and KV cache.")] = EngineConfig.dtype,
    device: Annotated[str, _model("--device", help="auto, cpu, cuda or cuda:N.")] = EngineConfig.device,
    tensor_parallel_size: Annotated[
        int, _engine("--tensor-parallel-size", "--tp", "-tp", help="GPUs (or processes) that share the model.")
    ] = EngineConfig.tensor_parallel_size,
    tp_timeout: Annotated[
        float, _engine("--tp-timeout", help="Seconds that these processes wait for each other.")
    ] = EngineConfig.tp_timeout,
    max_num_seqs: Annotated[
        int, _engine("--max-num-seqs", help="Sequences that run at the same time.")
    ] = EngineConfig.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _engine("--max-num-batched-tokens", help="Tokens of one step, prefill and decode together.")
    ] = EngineConfig.max_num_batched_tokens,
    max_prefill_chunk: Annotated[
        int | None, _engine("--max-prefill-chunk", help="Longest piece of a prompt in one step.")
    ] = None,
    max_model_len: Annotated[
        int | None,
        _engine("--max-model-len", parser=whole_or_auto, metavar="N|auto", help="Longest sequence, prompt and output."),
    ] = None,
    block_size: Annotated[
        int | None, _engine("--block-size", parser=whole_or_auto, metavar="N|auto", help="Tokens of one KV block.")
    ] = None,
    num_blocks: Annotated[
        int | None, _engine("--num-blocks", help="KV blocks, instead of what the memory allows.")
    ] = None,
    kv_memory: Annotated[
        int | None, _engine("--kv-memory", parser=memory_size, metavar="SIZE", help="KV pool in bytes, like 4GiB.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, _engine("--gpu-memory-utilization", help="Part of the GPU's memory that may be used.")
    ] = EngineConfig.gpu_memory_utilization,
    enable_prefix_caching: Annotated[
        bool,
        _engine("--enable-prefix-caching/--no-enable-prefix-caching", help="Share the KV blocks of equal prefixes."),
    ] = EngineConfig.enable_prefix_caching,
    schedule: Annotated[SchedulePolicy, _engine("--schedule", help="What a step may hold.")] = EngineConfig.schedule,
    enforce_eager: Annotated[bool, _engine("--enforce-eager", help="No CUDA graphs.")] = EngineConfig.enforce_eager,
    attention: Annotated[AttentionChoice, _engine("--attention", help="Attention back end.")] = EngineConfig.attention,
    kernels: Annotated[KernelChoice, _engine("--kernels", help="Kernel set.")] = EngineConfig.kernels,
    seed: Annotated[int, _engine("--seed", help="Seed of the random numbers.")] = EngineConfig.seed,
) -> EngineConfig:
    source = ctx.get_parameter_source("model")
    if model_argument is not None:
        # An environment variable or a config file may name a model as well; only two on the command line contradict.
        if model is not None and model != model_argument and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"two models are given, '{model_argument}' and '{model}'; give one of them.")
        model, source = model_argument, ctx.get_parameter_source("model_argument")
    return EngineConfig(
        model=model,
        model_named=_MODEL_NAMED.get(source.name if source is not None else "", "as asked for"),
        revision=revision,
        load_format=load_format,
        dtype=dtype,
        device=device,
        tensor_parallel_size=tensor_parallel_size,
        tp_timeout=tp_timeout,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        kv_memory=kv_memory,
        gpu_memory_utilization=gpu_memory_utilization,
        enable_prefix_caching=enable_prefix_caching,
        schedule=schedule,
        enforce_eager=enforce_eager,
        attention=attention,
        kernels=kernels,
        seed=seed,
    )


@dataclass(frozen=True)
class SamplingFlags:
    """The sampling parameters that were given on the command line, by SamplingParams' names; the rest is not set."""

    given: dict[str, Any]

    def __post_init__(self) -> None:
        SamplingParams.from_options(self.given)  # refuses values out of range before anything slow happens


def sampling_options(
    max_tokens: Annotated[int | None, _sampling("--max-tokens", help="Longest answer, in tokens.")] = None,
    temperature: Annotated[float | None, _sampling("--temperature", help="0 is greedy.")] = None,
    top_p: Annotated[float | None, _sampling("--top-p", help="Nucleus: the smallest set with this mass.")] = None,
    top_k: Annotated[int | None, _sampling("--top-k", help="The k most likely tokens; 0 is off.")] = None,
    min_p: Annotated[float | None, _sampling("--min-p", help="Least probability, relative to the best.")] = None,
    repetition_penalty: Annotated[float | None, _sampling("--repetition-penalty", help="1 is off.")] = None,
    presence_penalty: Annotated[float | None, _sampling("--presence-penalty", help="0 is off.")] = None,
    frequency_penalty: Annotated[float | None, _sampling("--frequency-penalty", help="0 is off.")] = None,
    stop: Annotated[list[str] | None, _sampling("--stop", help="Text that ends an answer (repeatable).")] = None,
) -> SamplingFlags:
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": tuple(stop) if stop else None,
    }
    return SamplingFlags({name: value for name, value in options.items() if value is not None})


@dataclass(frozen=True)
class DisplayOptions:
    """What a command shows and records beside its result."""

    ui: UiChoice
    events: Path | None
    cache_snapshot: Path | None
    json: bool
    quiet: bool
    verbose: bool
    no_color: bool
    ascii: bool


def display_options(
    ui: Annotated[UiChoice, _display("--ui", help="live: figures and bars in place; log: a line every 10 s.")] = "auto",
    events: Annotated[Path | None, _display("--events", help="Write a JSON line per engine step.")] = None,
    cache_snapshot: Annotated[
        Path | None, _display("--cache-snapshot", help="Write the state of the KV blocks at the end.")
    ] = None,
    json: Annotated[bool, _display("--json", help="The result as one JSON document on stdout.")] = False,
    quiet: Annotated[bool, _display("-q", "--quiet", help="Only the result, warnings and errors.")] = False,
    verbose: Annotated[bool, _display("-v", "--verbose", help="More details; tracebacks of errors.")] = False,
    no_color: Annotated[bool, _display("--no-color", help="No colours.")] = False,
    ascii: Annotated[bool, _display("--ascii", help="Bars and signs in plain ASCII.")] = False,
) -> DisplayOptions:
    if quiet and verbose:
        raise typer.BadParameter("-q and -v contradict each other; give one of them")
    return DisplayOptions(ui, events, cache_snapshot, json, quiet, verbose, no_color, ascii)
