"""The program `nanoinfer`: its subcommands, the options before them, and the configuration file."""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from typing import Annotated

import typer

from nanoinfer.cli import bench, chat, generate, inspect_cache
from nanoinfer.cli.command import BROKEN_PIPE, ENGINE_FAILURE, command, discard_output, output_error
from nanoinfer.cli.completion import install_completion, prepare_completion, show_completion
from nanoinfer.cli.help import PanelGroup
from nanoinfer.cli.session import Services
from nanoinfer.cli.settings import config_path, read_settings, spellings_of
from nanoinfer.errors import NanoinferError
from nanoinfer.ui.console import Console

app = typer.Typer(
    name="nanoinfer",
    cls=PanelGroup,
    epilog="An option can also be set in the environment (NANOINFER_MAX_NUM_SEQS=64) or in the configuration file.",
    no_args_is_help=True,
    add_completion=False,  # completion.py has it without the cost
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from nanoinfer.cli.version import print_version

        print_version(Console())
        raise typer.Exit


@app.callback()
def nanoinfer(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Versions, devices, and what is not used and why."
        ),
    ] = False,
    install: Annotated[
        bool,
        typer.Option(
            "--install-completion", callback=install_completion, is_eager=True, help="Completion by TAB for this shell."
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show-completion",
            callback=show_completion,
            is_eager=True,
            help="Print the script of that.",
        ),
    ] = False,
) -> None:
    """Run large language models on this machine, and see what happens inside."""
    subcommands = ctx.command.commands  # type: ignore[attr-defined]
    ctx.default_map = read_settings(config_path(), {name: spellings_of(c.params) for name, c in subcommands.items()})


command(app, "chat")(chat.chat)
command(app, "generate")(generate.generate)
command(app, "bench", bench.BenchCommand)(bench.bench)
command(app, "inspect-cache")(inspect_cache.inspect_cache)


def _serve_as_rank() -> None:
    """Where torchrun started this process as another rank than 0: that one has the command line and the files."""
    from nanoinfer.runner.torchrun import Launch
    from nanoinfer.worker import join

    if (launch := Launch.from_environment()) is not None:
        join(launch)


def _open_standard_streams() -> None:
    """Make a standard stream that is closed (`>&-`) as good as the null device: its number would go to the next file
    that is opened, and Python has None in its place."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def main(arguments: list[str] | None = None, services: Services | None = None) -> None:
    """Entry point; leaves through SystemExit with the exit code. `arguments` and `services` are for tests, whose
    process goes on afterwards."""
    _open_standard_streams()
    if os.environ.get("RANK", "0") != "0":
        _serve_as_rank()
    words = tuple(sys.argv[1:] if arguments is None else arguments)
    prepare_completion()
    try:
        try:
            app(arguments, prog_name="nanoinfer", obj=replace(services or Services(), arguments=words))
        finally:  # it leaves through SystemExit
            sys.stdout.flush()
    except NanoinferError as error:  # from the configuration file; a command handles its own
        Console().error(str(error))
        sys.exit(error.exit_code)
    except BrokenPipeError:
        discard_output()
        sys.exit(BROKEN_PIPE)
    except OSError as error:  # of what typer prints itself, such as --help
        Console().error(str(output_error(error)))
        sys.exit(ENGINE_FAILURE)
    finally:
        if arguments is None and threading.current_thread() is threading.main_thread():
            # What is left is the end of Python itself, in which a KeyboardInterrupt would only print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
