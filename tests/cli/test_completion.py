"""Shell completion, asked for as typer's scripts do it: through the environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def ask(shell: str, line: str) -> str:
    """What the program answers when TAB is pressed behind `line`."""
    words = line.split(" ")
    variables = {
        "_NANOINFER_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "nanoinfer"], env=os.environ | variables, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_commands_options_and_choices_are_completed(shell: str) -> None:
    assert "generate" in ask(shell, "nanoinfer gen")
    options = ask(shell, "nanoinfer bench --max-num-")
    assert all(name in options for name in ("--max-num-seqs", "--max-num-batched-tokens"))
    assert "--input-len" not in options
    choices = ask(shell, "nanoinfer chat --schedule pre")
    assert "prefill-first" in choices
    assert "mixed" not in choices


def test_a_wrong_configuration_file_does_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(os.environ["XDG_CONFIG_HOME"]) / "nanoinfer" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text("nonsense = 1")
    assert ask("bash", "nanoinfer gen") == "generate\n"


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_installed_script_works_in_bash(tmp_path: Path) -> None:
    """Install in a home of its own, start bash with it, and press TAB as bash does; nothing known means file names."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "nanoinfer"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nanoinfer "$@"\n')
    program.chmod(0o755)
    environment = os.environ | {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def bash(script: str) -> str:
        command = ["bash", "--norc", "-c", f"{script}\n:"]  # a last command, so that bash stays the program's parent
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "bash completion installed in" in bash("nanoinfer --install-completion")
    tab = 'COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _nanoinfer_completion nanoinfer; echo "[${COMPREPLY[*]}]"'
    shown = bash(
        f"source ~/.bashrc; complete -p nanoinfer; COMP_WORDS=(nanoinfer generate --val); {tab}; "
        f"COMP_WORDS=(nanoinfer generate -f pro); {tab}; COMP_WORDS=(nanoinfer generate ''); {tab}"
    )
    assert shown.splitlines() == [
        "complete -o default -F _nanoinfer_completion nanoinfer", "[--validate-only]", "[]", "[]",
    ]  # fmt: skip


def test_an_unknown_shell_is_refused(tmp_path: Path) -> None:
    script = "import shellingham, nanoinfer.cli.app as a\nshellingham.detect_shell = lambda: ('tcsh', '/bin/tcsh')\n"
    done = subprocess.run(
        [sys.executable, "-c", script + "a.main(['--show-completion'])"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "error: there is no completion for tcsh; start bash, zsh, fish or PowerShell.\n"
