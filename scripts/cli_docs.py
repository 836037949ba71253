"""Writes docs/cli.md, the reference of the command line, from the program itself: python scripts/cli_docs.py.

It reads the declarations and not typer's help, so the text does not depend on typer's version or a terminal's width.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from typer.models import ArgumentInfo, OptionInfo

from nanoinfer.cli import command
from nanoinfer.cli.app import app
from nanoinfer.cli.command import option_names
from nanoinfer.cli.options import DISPLAY, ENGINE, MODEL

TARGET = Path(__file__).resolve().parents[1] / "docs" / "cli.md"

SHARED = (MODEL, ENGINE, DISPLAY)

EXIT_CODES = {
    command.OK: "All went well.",
    command.ENGINE_FAILURE: "The engine failed, or inspect-cache found broken invariants. Finished results stay.",
    command.BAD_INPUT: "Wrong usage or input; the message says what to do.",
    command.FAILED_REQUESTS: "Finished, but some requests failed.",
    command.SLO_MISSED: "Fewer requests than `--slo-attainment` kept the limits.",
    130: "Interrupted by Ctrl-C.",
    command.BROKEN_PIPE: "The reader of standard output left early (`| head`).",
    143: "Ended by SIGTERM.",
}

INTRODUCTION = """\
# The command line

Made by `scripts/cli_docs.py` from the program; change the program, then run that.

    nanoinfer COMMAND [OPTIONS] [MODEL]

The result goes to standard output, everything else to standard error. `nanoinfer COMMAND --help` shows the options too.
"""

SETTINGS = """\
## Configuration file and environment

A flag comes before the environment, the environment before the configuration file, the file before the default.

Each option of a command has a variable, `NANOINFER_MAX_NUM_SEQS=64` for `--max-num-seqs 64`. That of a repeatable
option holds one value, spaces and all, or several, each on a line of its own: `NANOINFER_STOP=$'END\\nUser: '`.

The file is `$XDG_CONFIG_HOME/nanoinfer/config.toml` (`~/.config/nanoinfer/config.toml`), with the long names of
options (of a repeatable one, a list):

    model = "Qwen/Qwen3-0.6B"       # at the top: for every command that has the option
    max_num_seqs = 64

    [chat]                          # in a table: for one command
    system = "Answer briefly."

A name that no command has is refused with the nearest one that exists. Other variables:

| Variable | Meaning |
| --- | --- |
| `XDG_CONFIG_HOME` | Where the configuration file is. |
| `XDG_STATE_HOME`, `XDG_CACHE_HOME` | Where the chat's history and imported models are kept. |
| `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE`, ... | As in huggingface_hub, which fetches models. |
| `CUDA_VISIBLE_DEVICES`, `OMP_NUM_THREADS` | Which GPUs, and how many CPU threads, torch sees. |
| `NO_COLOR`, `TERM=dumb` | No colours; no display in place. |
| `CI` | `--ui auto` writes lines instead of a display in place. |
"""

COMPLETION = """\
## Shell completion

`nanoinfer --install-completion` sets up completion of commands, options and their values for the shell it is run in
(bash, zsh, fish, PowerShell); `--show-completion` prints the script instead. File names are completed by the shell.
"""


def document() -> str:
    """The whole of docs/cli.md."""
    callback = app.registered_callback
    assert callback is not None
    assert callback.callback is not None
    parts = [INTRODUCTION, *_options(callback.callback, "Options before the command").values()]
    shared: dict[str, str] = {}
    for info in app.registered_commands:
        assert info.callback is not None
        tables = _options(info.callback)
        for title in SHARED:
            table = tables.pop(title)
            assert shared.setdefault(title, table) == table, f"{info.name} has its own panel {title}"
        parts += [f"## nanoinfer {info.name}\n", inspect.getdoc(info.callback) + "\n", *tables.values()]
    codes = "\n".join(_cells(str(code), meaning) for code, meaning in EXIT_CODES.items())
    parts += ["## Options that every command has\n", *shared.values()]
    parts += [f"## Exit codes\n\n| Code | Meaning |\n| --- | --- |\n{codes}\n", SETTINGS, COMPLETION]
    return "\n".join(parts)


def _options(function: Callable[..., Any], first: str = "Options") -> dict[str, str]:
    """A table for each panel by its title, in the order of the help."""
    hints = get_type_hints(function, include_extras=True)
    panels: dict[str, list[str]] = {first: []}
    for name, parameter in inspect.signature(function).parameters.items():
        kind, info = _declaration(hints[name])
        if info is not None:
            panels.setdefault(info.rich_help_panel or first, []).append(_row(kind, info, parameter.default))
    head = "| Option | Default | Meaning |\n| --- | --- | --- |"
    return {title: "\n".join([f"**{title}**\n", head, *rows, ""]) for title, rows in panels.items()}


def _declaration(hint: Any) -> tuple[Any, OptionInfo | ArgumentInfo | None]:
    """(type without None, what typer was told) of an annotation; None for the context."""
    infos = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, OptionInfo | ArgumentInfo)]
    if not infos:
        return hint, None
    kind = get_args(hint)[0]
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not type(None))
    return kind, infos[0]


def _row(kind: Any, info: OptionInfo | ArgumentInfo, default: Any) -> str:
    if isinstance(info, ArgumentInfo):
        return _cells(f"`{info.metavar}`", "", info.help or "")
    names = ", ".join(f"`{name.replace('/', '` / `')}`" for name in option_names(info))
    value = "" if kind is bool else f" `{info.metavar or _metavar(kind)}`"
    help_text, _, told = (info.help or "").partition("  [")
    told = told.removesuffix("]").removeprefix("default: ")
    return _cells(names + value, told or _default(kind, default, info), help_text)


def _cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if get_origin(kind) is list:
        kind = get_args(kind)[0]
    return {int: "N", float: "X", str: "TEXT", Path: "FILE"}[kind]


def _default(kind: Any, default: Any, info: OptionInfo) -> str:
    if kind is bool and default is not None:
        first, slash, second = next(name for name in option_names(info) if name.startswith("--")).partition("/")
        return f"`{first if default else second}`" if slash else ""
    if info.metavar == "N|auto" and default is None:
        return "`auto`"
    return "" if default in (None, "") else f"`{default}`"


if __name__ == "__main__":
    TARGET.write_text(document(), encoding="utf-8")
