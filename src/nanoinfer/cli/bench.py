"""`nanoinfer bench`: throughput, latencies and goodput of this engine on this machine."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from nanoinfer.cli.bench_options import BenchOptions, OutputFormat
from nanoinfer.cli.help import PanelCommand
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UserError
from nanoinfer.loading.resolve import BUILTIN_MODEL

_SLO = re.compile(r"[a-z0-9_]+:[0-9.]+")
_LEVELS = re.compile(r"auto|([a-z]+:)?[0-9.]+(,[0-9.]+)*")
_MEANT_AS_LEVELS = re.compile(r"-?[0-9][^/]*$|[^-].*[:,]|[:,]|[^-/][^/]*$")


class BenchCommand(PanelCommand):
    """Reads `--goodput ttft:200 tpot:50` as one option, although a second word would be the model, and a bare `--sweep`
    as `--sweep auto`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return list(super().parse_args(ctx, complete_sweep(join_goodput(args))))


def join_goodput(arguments: list[str]) -> list[str]:
    """The arguments with the words after --goodput that look like METRIC:NUMBER made one; it may be repeated."""
    joined: list[str] = []
    words: list[str] = []
    collecting = False
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name == "--goodput":
            collecting = True
            words += [value] if value else []
        elif collecting and all(_SLO.fullmatch(word) for word in re.split("[ ,]", argument)):
            words.append(argument)
        elif collecting and not words:
            break  # let the parser complain about what follows --goodput
        else:
            collecting = False
            joined.append(argument)
    return ["--goodput", " ".join(words), *joined] if words else arguments


def complete_sweep(arguments: list[str]) -> list[str]:
    """The arguments with `auto` behind a --sweep that no levels follow."""
    completed = []
    for place, argument in enumerate(arguments, 1):
        completed.append(argument)
        if argument == "--sweep" and not any(_are_levels(word) for word in arguments[place : place + 1]):
            completed.append("auto")
    return completed


def _are_levels(word: str) -> bool:
    """Whether a word behind --sweep is meant as its levels, well-formed or not. Otherwise it is an option or a model:
    the built-in one, something with a slash, or a file or folder that exists."""
    if not word or _LEVELS.fullmatch(word):
        return True
    if word == BUILTIN_MODEL:
        return False
    return bool(_MEANT_AS_LEVELS.match(word)) and not os.path.exists(os.path.expanduser(word))


def bench(
    session: Session,
    config: EngineConfig,
    options: BenchOptions,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the result as JSON, too.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    format: Annotated[
        OutputFormat | None, typer.Option("--format", help="What is printed.  [default: table]", show_default=False)
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Hold the result against an earlier one.")
    ] = None,
) -> int:
    """Measure throughput and latencies.

    Without a model: the Qwen3-0.6B shape with random weights on a GPU, the small built-in model on a CPU. Outputs
    always have the full length (ignore_eos). Saved results have the keys of vLLM's benchmarks.

    A line of a custom file is {"prompt": text or ids, "output_tokens": N} (or "messages" for a chat), of a trace
    {"timestamp": ms, "input_length": N, "output_length": N, "hash_ids": [...]} as in the Mooncake traces.
    """
    session.announce("starting")
    from nanoinfer.cli.bench_run import Report, run_bench

    if session.display.json and format not in (None, "json"):
        raise UserError(f"--json and --format {format} contradict each other; give one of them.")
    shown: OutputFormat = "json" if session.display.json else format or "table"
    return run_bench(session, config, options, Report(shown, output, overwrite, compare))
