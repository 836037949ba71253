"""`nanoinfer chat`: a conversation with a model in the terminal."""

# Annotations are evaluated here, not kept as strings: compiling them again from text would double the start-up time.

from typing import Annotated

import typer

from nanoinfer.cli.options import SamplingFlags, ThinkChoice, ThinkingDisplay
from nanoinfer.cli.session import Session
from nanoinfer.config import EngineConfig


def chat(
    session: Session,
    config: EngineConfig,
    sampling: SamplingFlags,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System prompt.")] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", metavar="TEXT", help="Answer this and leave.")] = None,
    think: Annotated[ThinkChoice, typer.Option("--think", help="The chat template's thinking switch.")] = "auto",
    thinking: Annotated[
        ThinkingDisplay, typer.Option("--thinking", help="Show the model's thinking, dim, or hide it.")
    ] = "show",
    markdown: Annotated[
        bool, typer.Option("--markdown/--no-markdown", help="Render Markdown on a terminal with colours.")
    ] = True,
    stats: Annotated[
        bool | None, typer.Option("--stats/--no-stats", help="Numbers after each answer (default: on a terminal).")
    ] = None,
    history: Annotated[
        bool, typer.Option("--history/--no-history", help="Remember typed lines for the next chat.")
    ] = True,
) -> int:
    """Talk to a model. Commands inside start with "/"; /help lists them."""
    session.announce("starting")
    from nanoinfer.cli.chat_run import ChatOptions, run_chat

    return run_chat(
        session, config, ChatOptions(sampling.given, system, prompt, think, thinking, markdown, stats, history)
    )
