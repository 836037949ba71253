"""Help texts in panels that fit 80 columns and need no import of rich (which costs more than all else together), and
where a wrong value came from."""

from __future__ import annotations

from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from nanoinfer.errors import UserError


class _Panels:
    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Usage and description, then the parameters grouped by their panel, a command's own options first."""
        self.format_usage(ctx, formatter)  # type: ignore[attr-defined]
        self.format_help_text(ctx, formatter)  # type: ignore[attr-defined]
        panels: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            record = parameter.get_help_record(ctx)
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or "Options", []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)
        if hasattr(self, "format_commands"):
            self.format_commands(ctx, formatter)
        self.format_epilog(ctx, formatter)  # type: ignore[attr-defined]


class PanelCommand(_Panels, TyperCommand):
    """A subcommand with its help in panels."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for parameter in self.params:
            if getattr(parameter, "multiple", False):
                parameter.value_from_envvar = partial(_lines_of_variable, parameter)  # type: ignore[method-assign]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuses a wrong value in plain words, with the place where it was set if it was not typed, and a second file
        of prompts, since only the last would be read."""
        words = list(args)  # the parser takes them out of `args`
        try:
            rest = list(super().parse_args(ctx, args))
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's, by way of typer 0.29
            source = ctx.get_parameter_source(error.param.name) if error.param is not None else None
            place = {"ENVIRONMENT": "the environment", "DEFAULT_MAP": "the configuration file"}.get(
                source.name if source is not None else ""
            )
            if error.param is not None and getattr(error.param, "multiple", False):
                given = ctx.lookup_default(error.param.name)
                if place == "the configuration file" and isinstance(given, str):
                    error.message = f"write a list, [{given!r}]"
            if place is not None:
                error.message = f"{error.message.rstrip('.')} (set in {place})."
            raise
        if not ctx.resilient_parsing:  # the shell that asks for completions gets no messages
            self._refuse_second_file(ctx, words)
        return rest

    def _refuse_second_file(self, ctx: Any, words: list[str]) -> None:
        *_, given = self.make_parser(ctx).parse_args(args=words)
        if sum(parameter.name == "file" for parameter in given) > 1:
            raise UserError(
                "-f is given more than once, and one file is read at a time; put them together first: "
                f"cat FILE1 FILE2 | {ctx.command_path} -f -"
            )


def _lines_of_variable(parameter: Any, ctx: Any) -> list[str] | None:
    """The values of a repeatable option in the environment, one a line; typer would split a text at its spaces."""
    lines = (parameter.resolve_envvar_value(ctx) or "").split("\n")
    return [line for line in lines if line] or None


class PanelGroup(_Panels, TyperGroup):
    """The program itself with its help in panels."""

    def get_help_option(self, ctx: Any) -> Any:
        """typer imports pydantic (0.2 s) to convert the None of a --help that was not given; False needs nothing."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
