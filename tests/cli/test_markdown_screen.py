"""Markdown on a terminal while it streams: what a person sees at the end, on a terminal of any size."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable

import pyte
import pytest

from nanoinfer.ui.answer import AnswerPrinter
from nanoinfer.ui.answer_stream import MarkdownStream
from nanoinfer.ui.console import Console
from nanoinfer.ui.markdown import BlockRenderer
from nanoinfer.ui.markdown_blocks import Block, BlockSplitter
from nanoinfer.ui.wrap import WrappedText, cells, wrap, wrapped_rows

SAMPLE = """\
# Paged KV cache

A **paged** cache splits the keys of a sequence into *blocks* of fixed size, such as `16` tokens; see
[the paper](https://example.org/x).
Steps:
1. **Allocate** blocks for the whole prompt, which is more than fits on one line of a narrow terminal.
2. Free the table from its end:
   - the tail goes first

   ```sh
   free --tail
   ```

10. Done

```python
def slot(table: list[int]) -> int:
    '''Two

    lines.'''
\treturn table[0] * 16 + 7  # a line of code that is so long that the terminal has to break it by itself
```

| state  | 数量 |
|--------|-----:|
| cached | 240 |

> A quote.

漢字かな交じり文を表示する長い段落です。単語の間に空白がないので、どこで折り返してもかまいません。
---
<b>html</b> &amp; 2 * 3 * 4, ~~gone~~, snake_case_name ![a](b.png)
"""

SEEN_AT_60 = """\
Paged KV cache

A paged cache splits the keys of a sequence into blocks of
fixed size, such as 16 tokens; see
the paper (https://example.org/x).
Steps:
1. Allocate blocks for the whole prompt, which is more than
   fits on one line of a narrow terminal.
2. Free the table from its end:
   • the tail goes first
   ```sh
   free --tail
   ```

10. Done

```python
def slot(table: list[int]) -> int:
    '''Two

    lines.'''
    return table[0] * 16 + 7  # a line of code that is so lo
ng that the terminal has to break it by itself
```

 state   数量
 ────────────
 cached   240

▌ A quote.

漢字かな交じり文を表示する長い段落です。単語の間に空白がな
いので、どこで折り返してもかまいません。
<b>html</b> & 2 * 3 * 4, gone, snake_case_name ![a](b.png)
"""


class Terminal:
    """A terminal with its scrollback, as the receiver of a stream's writes."""

    def __init__(self, columns: int, lines: int) -> None:
        self.screen = pyte.HistoryScreen(columns, lines, history=2000)
        self.screen.set_mode(pyte.modes.LNM)  # a newline also returns, as the line discipline makes it
        self._stream = pyte.Stream(self.screen)
        self.writes: list[str] = []

    def write(self, text: str) -> None:
        self.writes.append(text)
        self._stream.feed(text)

    def size(self) -> tuple[int, int]:
        return self.screen.columns, self.screen.lines

    def text(self) -> str:
        columns = self.screen.columns
        above = [
            "".join(line[x].data if x in line else " " for x in range(columns)) for line in self.screen.history.top
        ]
        lines = [line.rstrip() for line in (*above, *self.screen.display)]
        return "\n".join(lines).rstrip("\n") + "\n"


def pieces(text: str, size: int) -> Iterable[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def stream(text: str, terminal: Terminal, size: int = 4) -> Terminal:
    markdown = MarkdownStream(terminal.write, terminal.size, BlockRenderer())
    for piece in pieces(text, size):
        markdown.push(piece)
    markdown.end()
    return terminal


@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_the_sample_as_it_is_seen(size: int) -> None:
    assert stream(SAMPLE, Terminal(60, 50), size).text() == SEEN_AT_60


@pytest.mark.parametrize(("columns", "lines"), [(21, 60), (80, 24), (120, 24), (80, 7)])
def test_how_the_text_is_cut_makes_no_difference(columns: int, lines: int) -> None:
    whole = stream(SAMPLE, Terminal(columns, lines), 10_000).text()
    assert stream(SAMPLE, Terminal(columns, lines), 1).text() == whole
    words = set(re.findall(r"[a-z]+", SAMPLE)) - {"amp"}
    assert words <= set(re.findall(r"[a-z]+", whole.replace("\n", "") + whole))


def test_styles_are_the_terminals_own() -> None:
    screen = stream("some **bold** text\n\n```python\ndef f():\n    return 'x'\n```\n", Terminal(40, 20)).screen
    assert [screen.buffer[0][x].bold for x in (0, 5, 8, 10)] == [False, True, True, False]
    assert screen.buffer[3][0].fg != "default"  # def
    assert screen.buffer[4][11].fg != "default"  # the string
    assert {cell.bg for row in screen.buffer.values() for cell in row.values()} == {"default"}


def test_every_block_is_rendered_once_and_text_only_grows_before() -> None:
    rendered: list[Block] = []

    class Counting(BlockRenderer):
        def render(self, block: Block, width: int) -> str:
            rendered.append(block)
            return super().render(block, width)

    terminal = Terminal(60, 50)
    markdown = MarkdownStream(terminal.write, terminal.size, Counting())
    for piece in pieces(SAMPLE, 3):
        markdown.push(piece)
    markdown.end()
    assert "".join("\n" * block.gap + block.text + "\n" for block in rendered) == SAMPLE.replace("---\n<b>", "---\n<b>")
    erasing = sum("\x1b[J" in write for write in terminal.writes)
    assert erasing <= len(rendered)
    assert max(write.count("\x1b[J") for write in terminal.writes) == 1  # erased and drawn in one write: no flicker


def test_a_block_higher_than_the_screen_stays_as_it_was_written() -> None:
    long = " ".join(f"**word{i}**" for i in range(60))
    seen = stream(f"before\n\n{long}\n\n- *after*\n", Terminal(40, 6)).text()
    assert re.findall(r"\*\*word\d+\*\*", seen) == long.split()
    assert seen.startswith("before\n\n**word0** ")
    assert seen.endswith("\n\n• after\n")


@pytest.mark.parametrize("columns", [30, 90])
def test_a_resize_in_the_middle_of_a_block_loses_and_doubles_nothing(columns: int) -> None:
    terminal = Terminal(60, 12)
    markdown = MarkdownStream(terminal.write, terminal.size, BlockRenderer())
    words = [f"w{i}" for i in range(40)]
    markdown.push("**first**\n\n" + " ".join(words[:20]))
    terminal.screen.resize(12, columns)
    markdown.push(" " + " ".join(words[20:]) + "\nnext line\n\n*last*\n")
    markdown.end()
    seen = terminal.text()
    if columns > 60:  # pyte cuts off what a narrower terminal would wrap
        assert re.findall(r"w\d+", seen.replace("\n", "")) == words
    assert seen.startswith("first\n\nw0 w1")
    assert seen.endswith("next line\n\nlast\n")


ATTACKS = [
    "\x1b[2J\x1b]0;title\x07 \x9b31m",
    "\x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\",
    "[link](https://evil.example/\x1b[2J)",
    "&#13;&#x1b;[2J&#27;&#155;2J&#7;",
    "user\u202egpj.exe &#x202e;abc &#8238;x",
    "`\x1b[31m`\n\n    \x1b[2J\n\n```\x1b]0;x\x07\n\x1b[2J\r\n```\n",
    "| \x1b[2J | b |\n|--|--|\n| \x9d0;x\x07 | &#13; |\n",
    "![\x1b[2J](\x1b[2J)",
    "a\rb\x08\x08\x0b\x0c",
]


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("size", [1, 10_000])
def test_markdown_from_a_model_never_drives_the_terminal(attack: str, size: int) -> None:
    terminal = stream("x " + attack + "\n\nend\n", Terminal(80, 24), size)
    sent = "".join(terminal.writes)
    ours = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\d+A\x1b\[J|\r(?=[^\n]*\x1b\[K)|\x1b\[K", "", sent)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", ours), ours
    assert terminal.text().endswith("\nend\n")


def test_random_markdown_is_never_lost() -> None:
    random_ = random.Random(0)
    parts = [
        "**",
        "*",
        "`",
        "```",
        "~~~",
        "- ",
        "1. ",
        "> ",
        "# ",
        "|",
        "--",
        "\n",
        "\n",
        "\n\n",
        "   ",
        "[a](b)",
        "![",
        "<b>",
    ]
    for _ in range(25):
        text = "".join(random_.choice([*parts, f"w{random_.randrange(99)} "]) for _ in range(40))
        seen = stream(text, Terminal(33, random_.choice((5, 40))), random_.choice((1, 3, 500))).text()
        shown = re.findall(r"w\d+", seen.replace("\n", ""))
        for word in re.findall(r"w\d+", text):
            assert word in seen.replace("\n", "").replace(" ", "") or word in shown, (text, seen)


def test_blocks_are_closed_as_soon_as_nothing_can_change_them() -> None:
    splitter = BlockSplitter()
    lines = ["# h", "a", "b", "", "- x", "", "- y", "z", "```py", "- code", "```", "- q"]
    closed = [[block.text for block in splitter.push(line)] for line in lines]
    assert closed == [["# h"], [], [], ["a\nb"], [], [], ["- x"], [], ["- y\nz", "```py"], ["- code"], ["```"], []]
    assert [(block.text, block.gap) for block in splitter.finish()] == [("- q", False)]


@pytest.mark.parametrize("width", [4, 7, 10, 79])
def test_words_wrap_whole_and_no_row_is_too_wide(width: int) -> None:
    text = "It's a trap,  said 漢字かな交じり the incomprehensibilities 😀 of  spaces   "
    emoji = " e\u0301 👨‍👩‍👧 ❤️"  # which pyte measures in its own way
    rows = wrap(text + emoji, width)
    assert "".join(rows) == text + emoji
    assert all(sum(map(cells, row.rstrip(" "))) <= width for row in rows)
    expected = [row.rstrip(" ") for row in wrap(text, width)]
    for size in (1, 3, 100):
        terminal, wrapped = Terminal(width + 1, 60), WrappedText()
        for piece in pieces(text, size):
            terminal.write(wrapped.write(piece, width))
        assert terminal.text().split("\n")[: len(expected)] == expected


@pytest.mark.parametrize(
    ("line", "rows"),
    [("", 1), ("x" * 10, 1), ("x" * 11, 2), ("漢" * 5, 1), ("x" * 9 + "漢", 2), ("\tabc", 2), ("e\u0301", None)],
)
def test_rows_of_a_line_that_the_terminal_breaks(line: str, rows: int | None) -> None:
    assert wrapped_rows(line, 10) == rows


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "no_color", "markdown"),
    [({"TERM": "dumb"}, False, True), ({"NO_COLOR": "1"}, False, True), ({}, True, True), ({}, False, False)],
)
def test_without_colours_the_text_is_shown_as_it_was_generated(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], no_color: bool, markdown: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    terminal = Tty()
    console = Console(Tty(), no_color=no_color)
    monkeypatch.setattr(console, "size", lambda: (80, 24))
    printer = AnswerPrinter(terminal, console, markdown=markdown)
    for piece in pieces(SAMPLE, 7):
        printer.write("answer", piece)
    printer.end()
    assert terminal.getvalue() == SAMPLE
