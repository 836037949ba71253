"""Text for people: nothing drives the terminal, numbers are short."""

from __future__ import annotations

import io

import pytest

from nanoinfer.ui import text
from nanoinfer.ui.answer import AnswerPrinter
from nanoinfer.ui.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "␛[2J␛]0;title␇"),
        ("a\rb\r\nc\td", "a␍b\nc\td"),
        ("\x9b31m\x7f\x00", "\\x9b31m␡␀"),
        ("user\u202egpj.exe \u2066x\u2069 \u2028", "user\\u202egpj.exe \\u2066x\\u2069 \\u2028"),
        ("čeština 漢字 😀 ไทย", "čeština 漢字 😀 ไทย"),
    ],
)
def test_text_from_a_model_can_never_drive_the_terminal(raw: str, shown: str) -> None:
    assert text.visible(raw) == shown
    terminal = Terminal()
    printer = AnswerPrinter(terminal, Console(io.StringIO()))
    printer.write("answer", raw)
    assert terminal.getvalue() == shown


def test_a_pipe_gets_the_answer_byte_for_byte_and_no_thinking() -> None:
    pipe = io.StringIO()
    printer = AnswerPrinter(pipe, Console(io.StringIO()))
    printer.write("thinking", "hm")
    printer.write("answer", "\x1b[1mx")
    printer.end()
    assert pipe.getvalue() == "\x1b[1mx\n"


def test_thinking_is_dim_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    printer = AnswerPrinter(terminal, Console(Terminal()))
    printer.write("thinking", "hm")
    printer.write("answer", "yes")
    printer.end()
    assert terminal.getvalue() == "\x1b[2mhm\x1b[22m\n\nyes\n"


def test_the_console_shows_messages_harmless_and_plain_in_a_pipe() -> None:
    stream = io.StringIO()
    console = Console(stream)
    console.status("never in a pipe")
    console.say("a\x1b[2Jb")
    console.error("bad")
    assert stream.getvalue() == "a␛[2Jb\nerror: bad\n"


def test_a_terminal_breaks_lines_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary of a run at 40 columns: 137 prompt tok, and on the next row: ens."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setattr(Console, "size", lambda self: (20, 24))
    console = Console(terminal := Terminal())
    console.say("137 prompt tokens, 12 output tokens -> out.jsonl")
    console.warn("a-word-that-is-longer-than-a-row or 漢字漢字漢字漢字漢字漢字 and\x1b so on")
    console.error("try 'pip install some thing' now")
    console.dim("twelve and 12345678 | exactly twenty long")
    console.more("  a command --to copy --as it.is")
    assert terminal.getvalue().split("\n") == [
        "137 prompt tokens,",
        "12 output tokens ->",
        "out.jsonl",
        "\x1b[33mwarning:\x1b[0m",
        "a-word-that-is-longer-than-a-row or 漢字漢字漢字漢字漢字漢字",
        "and␛ so on",
        "\x1b[31;1merror:\x1b[0m try",
        "'pip install some thing' now",
        "\x1b[2mtwelve and 12345678",
        "| exactly twenty",
        "long\x1b[0m",
        "  a command --to copy --as it.is",
        "",
    ]


def test_an_empty_no_color_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for value, colour in (("", True), ("0", False), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        assert Console(Terminal()).colour == colour


def test_quiet_keeps_warnings_and_errors() -> None:
    stream = io.StringIO()
    console = Console(stream, quiet=True)
    console.say("x")
    console.dim("y")
    console.warn("w")
    console.error("e")
    assert stream.getvalue() == "warning: w\nerror: e\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [("16GiB", 16 << 30), ("16G", 16 << 30), ("800M", 800 << 20), ("1GB", 10**9), ("1.5k", 1536), ("77", 77)],
)
def test_memory_sizes(given: str, expected: int) -> None:
    assert text.parse_bytes(given) == expected


@pytest.mark.parametrize("given", ["", "GiB", "-1G", "1 potato", "1e9"])
def test_bad_memory_sizes(given: str) -> None:
    with pytest.raises(ValueError, match="is not a memory size"):
        text.parse_bytes(given)


def test_numbers() -> None:
    assert [text.rate(x) for x in (4.123, 41.23, 412.3, 4123.0)] == ["4.12", "41.2", "412", "4,123"]
    assert [text.milliseconds(x) for x in (0.4211, 24.31, 831.0, 12_400.0)] == [
        "0.42 ms",
        "24.3 ms",
        "831 ms",
        "12.4 s",
    ]
    assert [text.duration(x) for x in (8.2, 187, 3750)] == ["8 s", "3:07", "1:02:30"]
    assert [text.byte_size(x) for x in (512, 98_362_432, 1.5 * 2**30, 3 * 2**40)] == [
        "512 B", "93.8 MiB", "1.5 GiB", "3.0 TiB",
    ]  # fmt: skip
    assert (text.plural(1, "line"), text.plural(1200, "line")) == ("1 line", "1,200 lines")
