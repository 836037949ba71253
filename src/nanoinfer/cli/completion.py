"""Shell completion: typer's, behind options of our own, since its two would cost 0.2 s at each start."""

from __future__ import annotations

import os
from typing import Any

from nanoinfer.errors import UserError

REQUEST = "_NANOINFER_COMPLETE"  # the variable through which typer's script asks the program


def prepare_completion() -> None:
    """Get ready to answer if it is a shell that has started the program."""
    if REQUEST in os.environ:
        from typer._completion_classes import completion_init  # which typer calls for its own two options only

        completion_init()


def install_completion(ctx: Any, param: Any, wanted: bool) -> None:
    """The callback of --install-completion: put the script where the shell finds it, and exit."""
    if wanted and not ctx.resilient_parsing:
        from typer.completion import install_callback

        install_callback(ctx, param, _shell())


def show_completion(ctx: Any, param: Any, wanted: bool) -> None:
    """The callback of --show-completion: print the script, and exit."""
    if wanted and not ctx.resilient_parsing:
        from typer.completion import show_callback

        show_callback(ctx, param, _shell())


def _shell() -> str:
    """The shell that the program was started from, or else the user's."""
    import shellingham

    try:
        shell = str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        shell = os.path.basename(os.environ.get("SHELL", ""))
    if shell not in ("bash", "zsh", "fish", "powershell", "pwsh"):
        raise UserError(f"there is no completion for {shell or 'this shell'}; start bash, zsh, fish or PowerShell.")
    return shell
