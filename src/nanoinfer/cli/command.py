"""How a function becomes a command: shared options are spliced in, and every failure becomes an exit code."""

from __future__ import annotations

import errno
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

import typer
from typer.models import OptionInfo

from nanoinfer.cli.bench_options import BenchOptions, bench_options
from nanoinfer.cli.help import PanelCommand
from nanoinfer.cli.interrupts import Interrupts, Terminated
from nanoinfer.cli.options import DisplayOptions, SamplingFlags, display_options, engine_options, sampling_options
from nanoinfer.cli.session import Services, Session
from nanoinfer.config import EngineConfig
from nanoinfer.errors import EngineError, NanoinferError
from nanoinfer.ui.console import Console

OK, ENGINE_FAILURE, BAD_INPUT, FAILED_REQUESTS, SLO_MISSED, BROKEN_PIPE = 0, 1, 2, 3, 4, 128 + 13

# A parameter annotated with one of these types is replaced by the parameters of the function that makes it.
PROVIDERS: dict[type, Callable[..., Any]] = {
    EngineConfig: engine_options,
    SamplingFlags: sampling_options,
    DisplayOptions: display_options,
    BenchOptions: bench_options,
}


def option_names(option: OptionInfo) -> list[str]:
    """All ways to write it, as they were declared; in an annotation typer takes the first of them for the default."""
    return [name for name in (option.default, *(option.param_decls or ())) if isinstance(name, str)]


def environment_variables(option: OptionInfo) -> list[str]:
    """NANOINFER_<NAME> for each of the option's long names."""
    names = [name.partition("/")[0] for name in option_names(option) if name.startswith("--")]
    return ["NANOINFER_" + name.removeprefix("--").replace("-", "_").upper() for name in names]


@cache
def resolved_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The function's parameters by name, as keywords, with their annotations resolved from strings.

    Every option among them can be set in the environment as well.
    """
    hints = get_type_hints(function, include_extras=True)
    for annotation in hints.values():
        for extra in getattr(annotation, "__metadata__", ()):
            if isinstance(extra, OptionInfo):
                extra.envvar, extra.show_envvar = environment_variables(extra), False
    keyword = inspect.Parameter.KEYWORD_ONLY
    return {
        name: parameter.replace(annotation=hints[name], kind=keyword)
        for name, parameter in inspect.signature(function).parameters.items()
    }


def command(
    app: typer.Typer, name: str, cls: type[PanelCommand] = PanelCommand
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register a function that returns an exit code as the subcommand `name` of `app`.

    Its first parameter is the Session; parameters whose type is in PROVIDERS become shared options.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        own = {key: p for key, p in resolved_parameters(function).items() if key != "session"}
        providers = {key: PROVIDERS[p.annotation] for key, p in own.items() if p.annotation in PROVIDERS}
        shared = {key: resolved_parameters(provider) for key, provider in providers.items()}
        shared.setdefault("display", resolved_parameters(display_options))
        parameters = {key: p for key, p in own.items() if key not in providers}
        for spliced in shared.values():
            parameters.update(spliced)

        def run(**values: Any) -> None:
            def body(session: Session) -> int:
                built = {key: provider(**{p: values[p] for p in shared[key]}) for key, provider in providers.items()}
                return function(session, **{key: values[key] for key in own if key not in providers}, **built)

            display = display_options(**{p: values[p] for p in shared["display"]})
            raise typer.Exit(run_guarded(body, display, values["ctx"].obj or Services()))

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        signature = {"ctx": context, **parameters}
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = inspect.Signature(list(signature.values()))  # type: ignore[attr-defined]
        run.__annotations__ = {key: p.annotation for key, p in signature.items()}
        app.command(name, cls=cls)(run)
        return function

    return register


def run_guarded(body: Callable[[Session], int], display: DisplayOptions, services: Services) -> int:
    """Run a command's body; returns the exit code, whatever happens to it."""
    console = Console(quiet=display.quiet, no_color=display.no_color, ascii=display.ascii)
    try:
        with Interrupts.installed() as interrupts:
            code = body(Session(display, console, interrupts, services))
            sys.stdout.flush()  # here its failure still has a message and an exit code
            return code
    except (KeyboardInterrupt, Terminated) as signal:
        console.clear_status()
        return Interrupts.exit_code(signal)
    except BrokenPipeError:
        discard_output()  # whoever read the result has seen enough (`| head`)
        return BROKEN_PIPE
    except NanoinferError as error:
        _show(console, error, display.verbose)
        return error.exit_code
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            # Files that are written have messages of their own; what is left is the result on standard output.
            error = output_error(error)
        _show(console, error, display.verbose)
        return ENGINE_FAILURE


def output_error(error: OSError) -> EngineError:
    """What to say where standard output cannot be written; what is left of it is given up."""
    discard_output()
    return EngineError(f"cannot write standard output: {error.strerror}; send it elsewhere.")


def discard_output() -> None:
    """Send the rest of standard output to the null device.

    Python flushes once more at its end, which would fail again and be reported in its own words.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show(console: Console, error: Exception, verbose: bool) -> None:
    if verbose:
        import traceback

        traceback.print_exception(error)
    if isinstance(error, NanoinferError):
        console.error(str(error))
    else:
        advice = "" if verbose else " This is unexpected; -v shows where it happened."
        console.error(f"{type(error).__name__}: {error}{'' if str(error).endswith('.') else '.'}{advice}")
