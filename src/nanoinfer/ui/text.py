"""Text for people: control characters made visible, and numbers, bytes and durations in few characters."""

from __future__ import annotations

import re

# C0 except tab and newline, DEL and C1: everything that a terminal may act on instead of showing. And what would show
# text in another order than it has: line and paragraph separators, bidirectional embeddings, overrides and isolates.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode pictures of the C0 controls: ESC is shown as one cell, U+241B
    if code == 0x7F:
        return "\u2421"
    return f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}"


def visible(text: str) -> str:
    """`text` with every character that could drive a terminal replaced by something to look at.

    Tab and newline stay; a carriage return before a newline is dropped, any other is shown.
    """
    return _CONTROL.sub(_picture, text.replace("\r\n", "\n"))


def one_line(text: str, width: int = 60) -> str:
    """`text` made visible, on one line, cut to `width` characters with an ellipsis."""
    flat = visible(text.replace("\n", " ").replace("\t", " "))
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def count(number: float) -> str:
    """A whole number with thousands separators: 142,827."""
    return f"{number:,.0f}"


def plural(number: int, noun: str) -> str:
    """`1 request`, `12 requests`, `3 branches`."""
    return f"{count(number)} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")


def rate(number: float) -> str:
    """A rate in three significant digits or as a whole number: 4.12, 41.2, 412, 4,120."""
    if number >= 100:
        return count(number)
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def percent(part: float, whole: float) -> str:
    """A share in whole percent; never 0% or 100% for what is not quite nothing or all."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"


def milliseconds(value: float) -> str:
    """Milliseconds in three significant digits, seconds from 10 s on: 0.42 ms, 24.3 ms, 831 ms, 12.4 s."""
    return f"{value / 1000:.1f} s" if value >= 10_000 else f"{rate(value)} ms"


def duration(seconds: float) -> str:
    """A time span: 8 s, 3:07, 1:02:30."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def byte_size(number: float) -> str:
    """Bytes in binary units: 512 B, 93.8 MiB, 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes from `16GiB`, `16G` (binary), `16GB` (decimal) or a plain number; ValueError for anything else."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a memory size; write it like 16GiB or 800M")
    number, unit, binary = match.groups()
    decimal = text.strip().lower().endswith("b") and not binary
    factor: int = (1000 if decimal else 1024) ** "bkmgt".index(unit.lower() or "b")
    return round(float(number) * factor)
