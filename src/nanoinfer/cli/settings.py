"""The configuration file: $XDG_CONFIG_HOME/nanoinfer/config.toml sets the defaults of options.

    model = "Qwen/Qwen3-0.6B"      # names are the long options; at the top they hold for every command that has them
    max_num_seqs = 64

    [chat]                          # a table holds for one command
    system = "Answer briefly."

Precedence is flag, environment, file, built-in default.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoinfer.errors import ConfigError


def config_path() -> Path:
    """Where the file is, whether it exists or not."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "nanoinfer" / "config.toml"


def read_settings(path: Path, spellings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """The file's defaults per command, {} if there is no file. `spellings` maps, for each command, every way to write
    an option to its parameter. ConfigError for a file that cannot be read or a name that no command has."""
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}.") from error
    defaults: dict[str, dict[str, Any]] = {command: {} for command in spellings}
    for name, value in settings.items():
        if not isinstance(value, dict):
            commands, entries = list(spellings), {name: value}
        elif name in spellings:
            commands, entries = [name], value
        else:
            raise ConfigError(f"{path}: there is no command '{name}'; the tables are {', '.join(spellings)}.")
        for key, entry in entries.items():
            takers = [command for command in commands if _canonical(key) in spellings[command]]
            if not takers:
                raise ConfigError(f"{path}: {_unknown(key, commands, spellings)}")
            for command in takers:
                # A command's own table comes after the top level in the file (TOML), so it wins.
                # A fraction is passed as text: typer 0.27 makes an int of the number 2.5 without a word.
                value_or_text = str(entry) if isinstance(entry, float) else entry
                defaults[command][spellings[command][_canonical(key)]] = value_or_text
    return defaults


def _canonical(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _unknown(key: str, commands: list[str], spellings: Mapping[str, Mapping[str, str]]) -> str:
    known = sorted({spelling for command in commands for spelling in spellings[command]})
    near = difflib.get_close_matches(_canonical(key), known, n=1)
    return f"unknown setting '{key}'" + (f"; did you mean '{near[0]}'?" if near else ".")


def spellings_of(parameters: list[Any]) -> dict[str, str]:
    """Every way to write the options of a command, without dashes, mapped to the parameter's name."""
    return {_canonical(option): parameter.name for parameter in parameters for option in parameter.opts}
