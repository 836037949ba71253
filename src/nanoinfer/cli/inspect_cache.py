"""`nanoinfer inspect-cache`: what the paged KV cache did with a file of prompts, or what would fit where."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from typing import Annotated

import typer

from nanoinfer.cli.options import memory_size
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UserError


def inspect_cache(
    session: Session,
    engine: EngineConfig,
    file: Annotated[
        str | None, typer.Option("-f", "--file", metavar="FILE", help="Run these prompts and report; - is stdin.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest answer of each prompt.")] = 16,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only compute what fits; needs config.json and --memory.")
    ] = False,
    memory: Annotated[
        int | None, typer.Option("--memory", parser=memory_size, metavar="SIZE", help="Memory of one GPU, like 80GiB.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Rows of the longest lists.")] = 12,
    show_text: Annotated[bool, typer.Option("--show-text", help="Show the text of cached prefixes.")] = False,
) -> int:
    """See the KV cache: blocks, shared prefixes, hits, integrity; or plan it from a config.json.

    Runs the prompts of a file (greedily, with short answers) and reports what their KV blocks did. Exit code 1 if the
    cache's own invariants are broken.
    """
    if plan:
        from nanoinfer.cli.cache_plan import run_plan

        if memory is None:
            raise UserError("--plan needs the memory of one GPU: add --memory 80GiB, for example.")
        return run_plan(session, engine, memory)
    if memory is not None:
        raise UserError("--memory belongs to --plan; the pool of a run is set with --kv-memory or --num-blocks.")
    session.announce("reading the prompts")
    from nanoinfer.cli.cache_run import run_inspection

    return run_inspection(session, engine, file, max_tokens, top=top, show_text=show_text)
