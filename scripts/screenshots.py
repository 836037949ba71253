"""Pictures for the documentation: real runs of the built-in model on a pseudo-terminal, exported as SVG by Rich.

    python scripts/screenshots.py [live] [chat] [inspect-cache]

Each writes docs/images/NAME.svg. Needs the packages of the "dev" extra.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
LONGEST_S = 600

# A dark terminal; the normal and the bright eight colours.
THEME = TerminalTheme(
    (24, 26, 31),
    (214, 218, 226),
    [(40, 44, 52), (232, 104, 114), (120, 190, 112), (222, 184, 102), (92, 164, 236), (196, 124, 218), (84, 184, 196),
     (171, 178, 191)],
    [(126, 134, 148), (240, 128, 136), (152, 210, 140), (236, 204, 128), (128, 188, 244), (214, 152, 232),
     (120, 206, 216), (230, 233, 238)],
)  # fmt: skip


class Terminal:
    """`nanoinfer ARGUMENTS` on a pseudo-terminal."""

    def __init__(self, arguments: list[str], columns: int, lines: int) -> None:
        self.shown = _wrapped(["nanoinfer", *arguments], columns - 4)
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.Stream(self._screen)
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "CI", "COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        environment["XDG_STATE_HOME"] = tempfile.mkdtemp()  # a chat must not add to anybody's history
        self._child = pexpect.spawn(
            sys.executable, ["-m", "nanoinfer", *arguments], env=environment, encoding="utf-8",
            dimensions=(lines, columns), cwd=ROOT,
        )  # fmt: skip

    def until(self, wanted: Callable[[str], object]) -> None:
        """Read on until the screen is as wanted, or the program ends."""
        deadline = time.monotonic() + LONGEST_S
        while not wanted("\n".join(self._screen.display)):
            if time.monotonic() > deadline:
                raise TimeoutError("\n".join(self._screen.display))
            try:
                piece = self._child.read_nonblocking(65536, 0.1)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                return
            # The emulator knows no faint text; bright black looks like it.
            self._stream.feed(re.sub(r"\x1b\[2m", "\x1b[90m", piece).replace("\x1b[22m", "\x1b[39m"))

    def type(self, text: str) -> None:
        self._child.send(text + "\r")

    def picture(self) -> Text:
        """What is on the screen, below the command that led to it. The program is ended."""
        if self._child.isalive():
            self._child.kill(signal.SIGKILL)
            self._child.wait()
        lines = [self._line(number) for number in range(self._screen.lines)]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return Text("\n").join([Text.assemble(("$ ", "bold green"), (self.shown, "bold")), *lines])

    def _line(self, number: int) -> Text:
        line = Text()
        for column in range(self._screen.columns):
            cell = self._screen.buffer[number][column]
            line.append(
                cell.data, Style(color=_colour(cell.fg), bold=cell.bold, italic=cell.italics, reverse=cell.reverse)
            )
        line.rstrip()
        return line


def _wrapped(words: list[str], width: int) -> str:
    """A command on as many lines as it needs."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > width - 4:
            lines.append("   ")
        lines[-1] += f" {word}"
    return " \\\n".join(lines)


def _colour(name: str) -> str | None:
    """Rich's name of the emulator's colour."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return re.sub("^bright", "bright_", name).replace("brown", "yellow")


def live() -> Text:
    """A benchmark in its middle: a pool that is nearly full, shared prefixes, two limits."""
    arguments = [
        *("bench", "smollm2", "--dataset", "prefix-repetition", "--num-prefixes", "3", "--prefix-len", "64"),
        *("--input-len", "16", "--output-len", "16:64", "--num-prompts", "40", "--max-num-seqs", "8"),
        *("--max-concurrency", "10", "--num-blocks", "80", "--goodput", "ttft:8000", "tpot:800"),
    ]
    terminal = Terminal(arguments, 100, 32)
    terminal.until(lambda screen: (done := re.search(r"(\d+) of 40 done", screen)) and int(done[1]) >= 26)
    terminal.until(lambda screen: "pressure" in screen)
    return terminal.picture()


def chat() -> Text:
    """Two turns: the second finds the first one's keys and values in the prefix cache."""
    terminal = Terminal(["chat", "smollm2", "--temperature", "0"], 92, 60)
    terminal.until(lambda screen: "/help" in screen)
    questions = (
        "Write a Python function that adds two numbers, and explain it in a short list.",
        "Now for three numbers.",
    )
    for turn, question in enumerate(questions, 1):
        terminal.type(question)
        terminal.until(lambda screen, turn=turn: screen.count(" · TTFT ") >= turn)  # type: ignore[misc]
    terminal.type("/cache")
    terminal.until(lambda screen: "pressure" in screen.partition("/cache")[2])
    return terminal.picture()


def inspect_cache() -> Text:
    """What a file of prompts left in the pool."""
    arguments = [
        "inspect-cache",
        "smollm2",
        "-f",
        "examples/prompts.jsonl",
        "--num-blocks",
        "256",
        "--max-num-seqs",
        "4",
    ]
    terminal = Terminal(arguments, 100, 60)
    terminal.until(lambda screen: False)
    return terminal.picture()


SHOTS: dict[str, Callable[[], Text]] = {"live": live, "chat": chat, "inspect-cache": inspect_cache}


def export(text: Text, path: Path, title: str) -> None:
    width = max(map(len, text.plain.split("\n"))) + 1
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, no_wrap=True, crop=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    console.save_svg(str(path), title=title, theme=THEME, unique_id=f"nanoinfer-{path.stem}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOTS)}; all by default")
    names = parser.parse_args().names or list(SHOTS)
    if unknown := set(names) - set(SHOTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for name in names:
        export(SHOTS[name](), IMAGES / f"{name}.svg", f"nanoinfer {name}" if name != "live" else "nanoinfer")
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
