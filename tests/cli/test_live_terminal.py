"""The live display on a real pseudo-terminal: widths, colours, characters, resizing, and where it must stay away."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pyte
import pytest

HERE = Path(__file__).parent
LINES = 40


class Watched:
    """The program on a terminal of `columns` by LINES; `until` reads on until the screen shows a text."""

    def __init__(self, tmp_path: Path, columns: int, *arguments: str, setting: str = "endless", **environment: str):
        prompts = tmp_path / "in.txt"
        prompts.write_text("one\ntwo\n")
        arguments = arguments or ("generate", "-f", str(prompts), "-o", str(tmp_path / "out.jsonl"))
        self.screen = pyte.Screen(columns, LINES)
        self.raw = ""
        self._stream = pyte.Stream(self.screen)
        self._child = pexpect.spawn(
            sys.executable, [str(HERE / "fake_main.py"), setting, "--", *arguments],
            env=environment_of(tmp_path, **environment), encoding="utf-8", timeout=20, dimensions=(LINES, columns),
        )  # fmt: skip

    def until(self, text: str) -> list[str]:
        """The rows of the screen as soon as one of them matches; the program's end counts as a match of nothing."""
        deadline = time.monotonic() + 20
        while not re.search(text, "\n".join(self.rows())):
            assert time.monotonic() < deadline, self.rows()
            self._read()
        return self.rows()

    def until_it_ends(self) -> list[str]:
        while self._read():
            pass
        self._child.close()
        return self.rows()

    def _read(self) -> bool:
        try:
            piece = self._child.read_nonblocking(65536, 0.05)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += piece
        self._stream.feed(piece)
        return True

    def rows(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def resize(self, columns: int) -> None:
        self._child.setwinsize(LINES, columns)
        self.screen.resize(LINES, columns)

    def interrupt(self) -> list[str]:
        self._child.sendintr()
        return self.until_it_ends()


def environment_of(tmp_path: Path, **environment: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "CI", "COLUMNS", "LINES")}
    return {**clean, "TERM": "xterm-256color", "XDG_CONFIG_HOME": str(tmp_path), **environment}


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_a_frame_fits_the_terminal_and_stands_once(tmp_path: Path, columns: int) -> None:
    run = Watched(tmp_path, columns)
    run.until("decode +[0-9]")
    rows = run.until(r"ITL +p50[\s\S]*pressure")
    [title] = [n for n, row in enumerate(rows) if row.startswith("nanoinfer generate")]
    labels = [row[:10].strip() for row in rows[title + 1 : title + 15]]
    assert labels == [
        "model", "engine", "requests", "", "KV pool", "", "prefix", "prefill", "decode", "TTFT", "TPOT", "ITL", "step",
        "pressure",
    ]  # fmt: skip
    assert max(map(len, rows[title:])) == columns - 1
    assert "attention torch (the only one)" in "\n".join(rows[:title]), "the reason stands at the start"
    assert "tokens (best with torch attention)" in "\n".join(rows[:title])
    run.interrupt()


def test_colours_mark_the_states_of_the_pool(tmp_path: Path) -> None:
    run = Watched(tmp_path, 80)
    run.until("█ [0-9]+ active")
    [line] = [n for n, text in enumerate(run.screen.display) if text.startswith("KV pool")]
    cells = run.screen.buffer[line]
    assert (cells[10].data, cells[10].fg) == ("█", "green")
    assert (cells[40].data, cells[40].fg) == ("░", "default")
    run.interrupt()


@pytest.mark.parametrize(("argument", "environment"), [("", {"NO_COLOR": "1"}), ("--no-color", {})])
def test_without_colour_no_cell_has_a_style(tmp_path: Path, argument: str, environment: dict[str, str]) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    arguments = [argument] if argument else []
    run = Watched(tmp_path, 80, "generate", "-f", str(tmp_path / "p.txt"), "-o", "-", *arguments, **environment)
    run.until("█ [0-9]+ active")
    run.interrupt()
    assert "nanoinfer generate" in run.raw
    assert not re.search(r"\x1b\[[0-9;]*m", run.raw)


def test_ascii_writes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n")
    run = Watched(tmp_path, 80, "generate", "-f", str(tmp_path / "p.txt"), "-o", str(tmp_path / "o"), "--ascii")
    run.until("# [0-9]+ active")
    run.interrupt()
    assert run.raw.isascii()


def test_resizing_in_the_middle_leaves_one_frame_of_the_new_width(tmp_path: Path) -> None:
    run = Watched(tmp_path, 120)
    run.until(r"ITL +p50[\s\S]*pressure")
    for columns in (70, 100, 60):
        run.resize(columns)
        deadline = time.monotonic() + 20
        # Without any row where the old frame has just been cleared.
        while not (rows := run.rows()) or max(map(len, rows)) != columns - 1 or "pressure" not in rows[-1]:
            assert time.monotonic() < deadline, run.rows()
            run._read()
        assert sum(row.startswith("nanoinfer generate") for row in rows) == 1
        assert sum(row.startswith("KV pool") for row in rows) == 1
    run.interrupt()


def test_in_a_terminal_too_small_for_a_frame_one_line_moves(tmp_path: Path) -> None:
    run = Watched(tmp_path, 39)
    rows = run.until("0/2 done")
    assert not any(row.startswith("KV pool") for row in rows)
    run.interrupt()


def test_one_prompt_on_the_command_line_gets_one_line_and_its_answer(tmp_path: Path) -> None:
    run = Watched(tmp_path, 80, "generate", "-p", "hi", "--max-tokens", "100")
    rows = run.until_it_ends()
    assert "0/1 done" in run.raw  # it may have come and gone between two looks at the screen
    assert not any("KV pool" in row or "/1 done" in row for row in rows)
    assert any(row.startswith("word word") for row in rows)


def test_the_table_of_bench_replaces_the_frame(tmp_path: Path) -> None:
    run = Watched(
        tmp_path, 100, "bench", "--num-prompts", "4", "--input-len", "8", "--output-len", "60", "--warmup", "0",
        "--goodput", "ttft:200", "tpot:50",
    )  # fmt: skip
    run.until("goodput .*kept every limit")
    rows = run.until_it_ends()
    assert not any(row.startswith(("nanoinfer bench", "KV pool", "requests  ")) for row in rows[:-30])
    assert sum("KV pool" in row for row in rows) == 0


def test_text_of_the_model_cannot_drive_the_terminal(tmp_path: Path) -> None:
    run = Watched(tmp_path, 80, "generate", "-p", "hi", setting="rude")
    rows = run.until_it_ends()
    assert any("red" in row for row in rows)
    assert "\x1b]0;" not in run.raw
    assert "\x1b[2J" not in run.raw


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"CI": "true"}])
def test_a_dumb_terminal_and_a_build_server_get_lines_only(tmp_path: Path, environment: dict[str, str]) -> None:
    run = Watched(tmp_path, 80, "generate", "-p", "hi", "--max-tokens", "40", "--no-color", **environment)
    run.until_it_ends()
    assert "1 answer in" in run.raw
    assert "\x1b[A" not in run.raw
    assert not re.search(r"\x1b\[\d*[AJ]", run.raw)


def test_pipes_get_no_escape_code(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(HERE / "fake_main.py"),
        "endless",
        "--",
        "generate",
        "-p",
        "hi",
        "--max-tokens",
        "40",
    ]
    for more in ([], ["--ui", "live"]):
        environment = environment_of(tmp_path, FORCE_COLOR="1")
        result = subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0
        assert "\x1b" not in result.stdout + result.stderr
        assert ("note: --ui live needs a terminal" in result.stderr) == bool(more)
