"""`nanoinfer inspect-cache`: what the paged KV cache did with prompts, now or in an earlier run, or what would fit."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from typing import Annotated

import typer

from nanoinfer.cli.options import memory_size
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import UserError


def inspect_cache(
    session: Session,
    config: EngineConfig,
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
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", help="The state after step N of --events; -1 is the last.")
    ] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", help="Rows of the longest lists.")] = 12,
    show_text: Annotated[bool, typer.Option("--show-text", help="Show the text of cached prefixes.")] = False,
) -> int:
    """See the KV cache: blocks, shared prefixes, hits, integrity; or plan it from a config.json.

    With -f the prompts of a file are run (greedily, with short answers). Without, --cache-snapshot FILE or --events
    FILE of an earlier run is read: a recording is stepped through with the arrow keys, or shown at --step N. Exit code
    1 if the cache's own invariants are broken.
    """
    if top < 0:
        raise UserError(f"--top is {top}; it must be at least 0.")
    snapshot, events = session.display.cache_snapshot, session.display.events
    if plan:
        from nanoinfer.cli.cache_plan import run_plan

        if memory is None:
            raise UserError("--plan needs the memory of one GPU: add --memory 80GiB, for example.")
        return run_plan(session, config, memory)
    if memory is not None:
        raise UserError("--memory belongs to --plan; the pool of a run is set with --kv-memory or --num-blocks.")
    if step is not None and (file is not None or events is None):
        raise UserError("--step shows a step of an earlier run; add --events FILE, and leave -f out.")
    if file is None and snapshot is not None and events is not None:
        raise UserError(
            "--cache-snapshot and --events are both given to be read; give one of them, or prompts with -f."
        )
    if file is None and snapshot is not None:
        from nanoinfer.cli.cache_snapshot_file import report_snapshot

        return report_snapshot(session, config, snapshot, top=top, show_text=show_text)
    if file is None and events is not None:
        from nanoinfer.cli.cache_browser import report_events

        return report_events(session, events, step, top=top)
    if file is None and config.model is not None and config.model.endswith((".jsonl", ".txt")):
        raise UserError(
            f"{config.model} is taken for a model; give prompts with -f, and the recording of a run with --events."
        )
    session.announce("reading the prompts")
    from nanoinfer.cli.cache_run import run_inspection

    return run_inspection(session, config, file, max_tokens, top=top, show_text=show_text)
