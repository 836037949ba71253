"""`nanoinfer generate`: answers a file of prompts into a file of results, checked before the model is loaded."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from pathlib import Path
from typing import Annotated

import typer

from nanoinfer.cli.options import SAMPLING, OnError, Order, ProfileFolder, SamplingFlags, ThinkChoice
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig


def generate(
    session: Session,
    config: EngineConfig,
    sampling: SamplingFlags,
    file: Annotated[
        str | None,
        typer.Option("-f", "--file", metavar="FILE", help="Prompts: JSONL, OpenAI batch or .txt; - is stdin."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option("-p", "--prompt", metavar="TEXT", help="A prompt (repeatable).")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Results; - or nothing is stdout.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing output; drop an interrupted run.")
    ] = False,
    order: Annotated[Order, typer.Option("--order", help="Order of the results.")] = "input",
    on_error: Annotated[
        OnError, typer.Option("--on-error", help="A bad line: write an error record, leave it out, or refuse all.")
    ] = "record",
    max_errors: Annotated[
        int | None, typer.Option("--max-errors", metavar="N", min=0, help="Stop after more than N failed lines.")
    ] = None,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="With --resume: run the lines that failed again.")
    ] = False,
    validate_only: Annotated[bool, typer.Option("--validate-only", help="Check the prompts and stop.")] = False,
    think: Annotated[ThinkChoice, typer.Option("--think", help="The chat template's thinking switch.")] = "auto",
    profile: ProfileFolder = None,
    n: Annotated[int, typer.Option("--n", metavar="N", help="Answers per prompt.", rich_help_panel=SAMPLING)] = 1,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to the token limit.", rich_help_panel=SAMPLING)
    ] = False,
) -> int:
    """Answer a file of prompts.

    A line is {"prompt": ...} or {"messages": [...]} with sampling options of its own, or OpenAI's batch form. A
    "prompt" is raw text; messages, .txt lines and -p go through the chat template. Results are kept in OUTPUT.partial
    until all are there; whatever ends a run early, --resume goes on with it.
    """
    session.announce("reading the prompts")
    from nanoinfer.cli.generate_run import GenerateOptions, run_generate

    options = GenerateOptions(
        sampling={"n": n, "ignore_eos": ignore_eos, **sampling.given},
        file=file,
        prompts=prompt or [],
        output=output,
        resume=resume,
        overwrite=overwrite,
        order=order,
        on_error=on_error,
        max_errors=max_errors,
        retry_errors=retry_errors,
        validate_only=validate_only,
        think=think,
        profile=profile,
    )
    return run_generate(session, config, options)
