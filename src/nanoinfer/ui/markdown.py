"""Blocks of Markdown as text with escape codes, through Rich, each rendered once."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from markdown_it.token import Token
from rich import markdown
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment, Segments
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme

from nanoinfer.ui.markdown_blocks import PARSER, Block
from nanoinfer.ui.text import visible

# Colours of the terminal's own palette on its own background, so that they suit a light one as well.
_CODE_THEME = "ansi_dark"
_THEME = Theme(
    {
        "markdown.code": "cyan",
        "markdown.item.bullet": "none",
        "markdown.item.number": "none",
        "markdown.h1": "bold underline",
        "markdown.h2": "bold",
        "markdown.h3": "bold",
        "markdown.h4": "bold italic",
        "markdown.h5": "italic",
        "markdown.h6": "italic",
        "markdown.link": "none",
        "markdown.block_quote": "dim",
        "markdown.table.header": "bold",
        "markdown.table.border": "dim",
    }
)
# Beyond so many lines of code they are no longer coloured: each new line is read together with those before it.
_MOST_COLOURED_LINES = 400


class _Heading(markdown.Heading):
    LEVEL_ALIGN = dict.fromkeys(markdown.Heading.LEVEL_ALIGN, "left")


class _Code(markdown.CodeBlock):
    """Code inside another block, such as a list item: between its fences, without a frame, so that it can be copied."""

    @classmethod
    def create(cls, markdown: markdown.Markdown, token: Token) -> _Code:
        code = cls(_language(token.info), markdown.code_theme)
        code.fences = (token.markup + token.info, token.markup)
        return code

    fences = ("", "")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        opening, closing = self.fences
        if opening:
            yield Text(opening, "dim")
        yield _highlight(str(self.text).rstrip("\n"), self.lexer_name)
        if closing:
            yield Text(closing, "dim")


class _Item(markdown.ListItem):
    """A list item as wide as it was typed, so that nothing moves when its text is replaced by it."""

    def _hanging(self, marker: str, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = cell_len(marker)
        inner = options.update(width=max(options.max_width - width, 1))
        for number, line in enumerate(console.render_lines(self.elements, inner, style=self.style, pad=False)):
            yield Segment(" " * width if number else marker)
            yield from line
            yield Segment.line()

    def render_bullet(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return self._hanging("- " if options.ascii_only else "• ", console, options)

    def render_number(self, console: Console, options: ConsoleOptions, number: int, last_number: int) -> RenderResult:
        return self._hanging(f"{number}. ", console, options)


class _Quote(markdown.BlockQuote):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        inner = options.update(width=max(options.max_width - 2, 1))
        for line in console.render_lines(self.elements, inner, style=self.style, pad=False):
            yield Segment("| " if options.ascii_only else "▌ ", self.style)
            yield from line
            yield Segment.line()


class _Markdown(markdown.Markdown):
    elements = {  # noqa: RUF012  as in the class it extends
        **markdown.Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "list_item_open": _Item,
        "blockquote_open": _Quote,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", hyperlinks=False)  # a terminal's hyperlink shows one address and opens another
        self.parsed = _harmless(PARSER.parse(text))


def _harmless(tokens: list[Token]) -> list[Token]:
    """The tokens with nothing in them that drives a terminal (an entity such as &#13; becomes a character only here),
    and with line ends kept: what a model writes on two lines, such as a verse, stands on two lines."""
    for token in tokens:
        token.content, token.info = visible(token.content), visible(token.info)
        for name, value in token.attrs.items():
            if isinstance(value, str):
                token.attrs[name] = visible(value)
        if token.type == "softbreak":
            token.type = "hardbreak"
        elif token.type == "image":  # as it was written: it cannot be shown, and Rich moves it out of its sentence
            token.type, token.tag = "text", ""
            token.content, token.children = f"![{token.content}]({token.attrs['src']})", None
        _harmless(token.children or [])
    return tokens


def _language(info: str) -> str:
    """The language of a fenced code block, from what stands behind its fence."""
    return info.strip().partition(" ")[0].lower()


def _highlight(code: str, language: str) -> Text:
    text = Syntax("", language, theme=_CODE_THEME, background_color="default", word_wrap=True).highlight(code)
    text.rstrip()
    return text


class BlockRenderer:
    """Renders the blocks of one answer in their order; the lines of a code block are coloured in the light of those
    before them."""

    def __init__(self, *, ascii: bool = False) -> None:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii" if ascii else "utf-8")
        self._console = Console(
            file=stream, force_terminal=True, legacy_windows=False, theme=_THEME, highlight=False, emoji=False
        )
        self._code: list[str] = []
        self._language = ""

    def render(self, block: Block, width: int) -> str:
        """The block's lines, at most `width` columns wide unless they are code, without a newline at the end."""
        if block.kind == "markdown":
            return self._render_markdown(block.text, width)
        if block.kind == "fence":
            self._code = []
            self._language = _language(block.text.strip().lstrip("`~"))
            return self._styled([Segment(visible(block.text), Style(dim=True))])
        self._code.append(visible(block.text))
        if not self._language or len(self._code) > _MOST_COLOURED_LINES:
            return self._code[-1]
        line = _highlight("\n".join(self._code), self._language).split("\n", allow_blank=True)[len(self._code) - 1 :]
        return self._styled(line[0].render(self._console)) if line else ""

    def _render_markdown(self, text: str, width: int) -> str:
        try:
            options = self._console.options.update(width=max(width, 1))
            segments = list(self._console.render(_Markdown(visible(text)), options))
        except Exception:  # Rich does not render every text that can be parsed; what the model wrote is then as good
            return visible(text)
        lines = [_without_trailing_space(line) for line in Segment.split_lines(segments)]
        while lines and not lines[0]:
            del lines[0]
        while lines and not lines[-1]:
            del lines[-1]
        return "\n".join(map(self._styled, lines))

    def _styled(self, segments: Iterable[Segment]) -> str:
        """The segments as text with escape codes; tabs and trailing spaces of code stay as they are."""
        with self._console.capture() as captured:
            self._console.print(Segments(segments), soft_wrap=True, end="")
        return captured.get()


def _without_trailing_space(line: list[Segment]) -> list[Segment]:
    kept = [segment for segment in line if not segment.control]
    while kept and not kept[-1].text.rstrip():
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(), kept[-1].style)
    return kept
