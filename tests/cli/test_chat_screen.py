"""`nanoinfer chat` as it looks: a real pseudo-terminal, and an emulated screen that a person would see."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

HERE = Path(__file__).parent


class Screen:
    """A chat on a terminal. `shows` waits until a pattern is on the screen or in its scrollback."""

    def __init__(self, arguments: list[str], environment: dict[str, str], columns: int, lines: int) -> None:
        self.child = pexpect.spawn(
            sys.executable, [str(HERE / "fake_main.py"), *arguments], env=environment, encoding="utf-8",
            cwd=environment["XDG_STATE_HOME"], dimensions=(lines, columns),
        )  # fmt: skip
        self.child.delaybeforesend = None
        self._screen = pyte.HistoryScreen(columns, lines, history=500)
        self._stream = pyte.Stream(self._screen)
        self.sent = ""

    def _read(self) -> bool:
        try:
            text = self.child.read_nonblocking(4096, timeout=0.1)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.sent += text
        self._stream.feed(text)
        return True

    def text(self) -> str:
        """The scrollback and the screen; wide characters are not expected here."""
        columns = self._screen.columns
        above = [
            "".join(line[x].data if x in line else " " for x in range(columns)) for line in self._screen.history.top
        ]
        return "\n".join(line.rstrip() for line in (*above, *self._screen.display)).rstrip()

    def shows(self, pattern: str) -> str:
        """The whole text, as soon as the pattern is found in it."""
        end = time.monotonic() + 20
        while not re.search(pattern, self.text()):
            if time.monotonic() > end or not self._read():
                pytest.fail(f"{pattern!r} never came:\n{self.text()}")
        return self.text()

    def prompt(self) -> str:
        """Wait for an empty prompt in the last line."""
        return self.shows(r"\n>>>\Z")

    def type(self, keys: str) -> None:
        self.child.send(keys)

    def resize(self, columns: int) -> None:
        self.child.setwinsize(self._screen.lines, columns)
        self._screen.resize(self._screen.lines, columns)

    def exit_code(self) -> int | None:
        while self._read():
            pass
        self.child.close()
        return self.child.exitstatus  # type: ignore[no-any-return]

    def style_of(self, word: str) -> pyte.screens.Char:
        """The cell in which a word begins on the screen."""
        for y, line in enumerate(self._screen.display):
            if word in line:
                return self._screen.buffer[y][line.index(word)]
        raise AssertionError(f"{word!r} is not on the screen:\n{self.text()}")


Start = Callable[..., Screen]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Screen] = []

    def open_screen(
        *settings: str, arguments: str = "", columns: int = 80, lines: int = 24, wait: bool = True, **more: str
    ) -> Screen:
        environment = {
            **os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path),
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }  # fmt: skip
        for name in ("NO_COLOR", "CI"):
            environment.pop(name, None)
        command = [*settings, "--", "chat", *shlex.split(arguments)]
        screen = Screen(command, environment | more, columns, lines)
        started.append(screen)
        if wait:
            screen.prompt()
        return screen

    yield open_screen
    for screen in started:
        screen.child.close(force=True)


WORDS = [f"w{i}" for i in range(70)]


def words(text: str) -> list[str]:
    """The numbered words, also those that a line break cut in two."""
    return re.findall(r"w\d+", text.replace("\n", ""))


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_markdown_answer(start: Start, columns: int) -> None:
    screen = start("markdown", columns=columns, lines=30)
    screen.type("tell me\r")
    screen.shows(r"stop\n>>>")
    shown = screen.text().partition(">>> tell me\n")[2]
    assert shown.startswith("Title\n\nsome bold text\n\nw0 w1 ")
    separator = r"( · |\n)"  # a narrow terminal has the statistics on two lines
    numbers = rf"\n315 tok · .* tok/s · TTFT .* · TPOT .* ms{separator}prompt 24 \(0 cached, 0%\) · stop\n"
    assert re.search(r"w69\n\n• last item" + numbers, shown)
    assert words(shown) == WORDS
    assert all(len(line) < columns for line in shown.split("\n"))
    assert [screen.style_of(word).bold for word in ("Title", "some", "bold")] == [True, False, True]
    assert screen.style_of("item").fg == "default"


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [("--no-color", {}), ("", {"NO_COLOR": "1"}), ("--no-markdown", {}), ("", {"TERM": "dumb"})],
)
def test_without_colours_or_markdown_the_answer_is_as_it_was_generated(
    start: Start, arguments: str, environment: dict[str, str]
) -> None:
    screen = start("markdown", arguments=arguments, **environment)
    screen.type("tell me\r")
    shown = screen.shows(r"stop\n>>>")
    assert "# Title\n\nsome **bold** text\n\nw0 " in shown
    assert "w69\n\n- *last* item\n" in shown
    assert words(shown) == WORDS


def test_ascii(start: Start) -> None:
    screen = start("markdown", arguments="--ascii")
    screen.type("tell me\r")
    assert "\n- last item\n" in screen.shows(r"stop\n>>>")
    assert screen.text().isascii()


@pytest.mark.parametrize("columns", [50, 100])
def test_a_resize_in_the_middle_of_an_answer(start: Start, columns: int) -> None:
    screen = start("markdown-slowly", columns=70)
    screen.type("tell me\r")
    screen.shows("w20 ")
    screen.resize(columns)
    shown = screen.shows(r"stop\n>>>")
    assert "\n• last item\n" in shown
    # The emulated screen cuts off what stands beyond a narrower width; a terminal would show it on a line more.
    assert words(shown)[-35:] == WORDS[-35:]
    assert columns < 70 or words(shown) == WORDS
    screen.type("/clear\rtell me\r")
    again = screen.shows(r"The conversation is empty(.|\n)*stop\n>>>").rpartition("tell me\n")[2]
    widest = max(len(line) for line in again.split("\n") if line.startswith("w"))
    assert columns - 6 < widest < columns  # written for the new width


def test_what_is_typed_during_an_answer_is_the_next_message_and_moves_nothing(start: Start) -> None:
    screen = start("markdown-slowly", columns=70)
    screen.type("tell me\r")
    screen.shows("w20 ")
    screen.type("/help\r")
    shown = screen.shows(r"stop\n>>> /help\n(.|\n)*/exit(.|\n)*\n>>>\Z")
    assert words(shown) == WORDS


def test_control_c_twice_in_an_answer_leaves_the_terminal_as_it_was(start: Start) -> None:
    screen = start("thinks-long")
    screen.type("go\r")
    screen.shows("hm hm")
    assert "\x1b[2m" in screen.sent
    screen.child.sendintr()
    screen.shows(r"\[stopped")  # two signals that nobody took yet are one
    screen.child.sendintr()
    assert screen.exit_code() == 130
    assert screen.sent.rfind("\x1b[22m") > screen.sent.rfind("\x1b[2mhm")  # dim no longer


def test_control_c_in_an_answer_and_a_message_after_it(start: Start) -> None:
    screen = start("endless", arguments="--system s")
    screen.type("go\r")
    screen.shows("word word word")
    screen.child.sendintr()
    shown = screen.shows(r"\[stopped; the text so far is kept\]\n(.|\n)*stopped\n>>>")
    assert re.search(r"\d+ tok · (.|\n)*prompt 28 \(0 cached, 0%\) · stopped", shown)
    screen.type("x")
    screen.shows(r">>> x\Z")
    screen.child.sendintr()  # clears the line, and is not the second of two
    screen.prompt()
    screen.type("and now\r")
    screen.shows("and now\nword word")
    screen.child.sendintr()
    shown = screen.shows(r"and now\n(.|\n)*stopped\n>>>\Z")
    assert int(re.findall(r"\((\d+) cached", shown)[-1]) > 28  # more than the first prompt: its answer, too


def test_control_c_at_an_empty_prompt_says_how_to_leave(start: Start) -> None:
    screen = start()
    screen.child.sendintr()
    screen.shows(r">>>\nCtrl-D or /exit leaves\.\n>>>\Z")
    screen.child.sendintr()
    screen.shows(r"(>>>\nCtrl-D or /exit leaves\.\n){2}>>>\Z")
    screen.child.sendeof()
    assert screen.exit_code() == 0


def test_control_d_deletes_in_a_line_and_leaves_on_an_empty_one(start: Start) -> None:
    screen = start()
    screen.type("xy\x01\x04\r")  # to the line's beginning, delete
    screen.shows("\nY\n")
    screen.prompt()
    screen.child.sendeof()
    assert screen.exit_code() == 0


def test_a_message_of_several_lines_can_be_edited_in_all_of_them(start: Start) -> None:
    screen = start()
    screen.type('"""one\r')
    screen.shows(r'>>> """one\n\.\.\.')
    screen.type('two"""\x1b[A\x1b[D\x1b[D\x1b[D!\x1b[B\r')  # up, into "one", down again
    screen.shows(r"\n!ONE\nTWO\n(.*\n)+>>>\Z")
    screen.type("three\x1b\rfour\r")
    screen.shows(r"\nTHREE\nFOUR\n(.*\n)+>>>\Z")
    screen.type("\x1b[A")
    screen.shows(r">>> three\n\.\.\. four\Z")  # one entry in the history


def test_a_pasted_text_is_one_message_whatever_is_in_it(start: Start) -> None:
    screen = start(arguments="--no-markdown")
    screen.type("\x1b[200~/* one\r\n\ttwo\n\nthree */\x1b[201~")
    screen.shows(r"three \*/\Z")
    assert "THREE" not in screen.text()  # a paste does not send itself
    screen.type("\r")
    screen.shows(r"\n/\* ONE\n +TWO\n\nTHREE \*/\n")


def test_completion_of_commands_settings_and_files(start: Start, tmp_path: Path) -> None:
    (tmp_path / "some file.txt").write_text("text of the file")
    screen = start()
    for keys, completed, outcome in (
        ("/reg\t", "/regen", "There is no answer to generate again."),
        ("/set temp\t", "temperature", "temperature is 0.6"),
        ("/set thinking h\t", "hide", "thinking is hide"),
        ("/read som\t", "some file.txt", "16 tokens of a context of 2,048"),
    ):
        screen.type(keys)
        screen.shows(completed + r"\Z")
        screen.type("\r")
        screen.shows(outcome)
        screen.prompt()
    screen.type("go on\r")
    screen.shows(r"TEXT OF THE FILE\n\nGO ON\n")


def test_a_file_is_overwritten_only_when_asked_for(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text("precious")
    screen = start()
    screen.type(f"hi\r/save {path}\r")
    screen.shows(r"exists.\nOverwrite it\? \[y/N\]\Z")
    screen.type("\r")
    screen.shows(r"Nothing was written.\n>>>")
    assert path.read_text() == "precious"
    screen.type(f"/save {path}\ry\r")
    screen.shows(r"1 turn saved in")
    assert "precious" not in path.read_text()
    screen.type("more\r/save\r")
    screen.shows(r"2 turns saved again in")


def test_hidden_thinking_leaves_no_trace(start: Start) -> None:
    screen = start("thinks", arguments="--thinking hide")
    screen.type("yes\r")
    shown = screen.shows(r"stop\n>>>")
    assert re.search(r">>> yes\nYES\n\d+ tok", shown), shown
    assert "thinking ..." in screen.sent
    screen.type("/set thinking show\r/regen\r")
    screen.shows(r"let me see\n\nYES\n")


def test_a_long_prompt_is_not_read_in_silence(start: Start, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 150)
    screen = start()
    screen.type("/read long.txt\r")
    screen.shows("749 tokens of a context|750 tokens of a context")
    screen.type("go\r")
    shown = screen.shows(r"stop\n>>>")
    assert re.search(r"reading 7\d\d tokens", screen.sent)
    assert "reading" not in shown


def test_one_letter_is_a_message_like_any_other(start: Start) -> None:
    screen = start()
    screen.type("q\r")
    screen.shows(r"\nQ\n")
    screen.type("exit\r")
    screen.shows(r"\nEXIT\n")


def test_stats_and_cache_panels_fit(start: Start) -> None:
    screen = start(columns=60, lines=40)
    screen.type("hi\r/stats\r/cache\r")
    shown = screen.shows(r"pressure .*\n>>>").partition("/stats\n")[2]
    assert re.search(r"3 tok(.|\n)*TTFT +p50(.|\n)*KV pool", shown)
    assert max(map(len, shown.split("\n"))) < 60
