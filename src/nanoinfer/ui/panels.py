"""Panels of the chat: the run so far (/stats) and the KV pool (/cache), made of the live display's rows."""

from __future__ import annotations

from rich.text import Text

from nanoinfer.ui.display import as_text
from nanoinfer.ui.glyphs import UNICODE, Glyphs
from nanoinfer.ui.rows import Layout, kv_rows, latency_rows, prefix_row, pressure_row, speed_rows, step_row
from nanoinfer.ui.snapshot import RunSnapshot


def stats_panel(snapshot: RunSnapshot, width: int = 80, glyphs: Glyphs = UNICODE) -> Text:
    """Latencies, speeds, prefix hits and step times, in at most `width` columns; no newline at its end."""
    layout = Layout(width, glyphs)
    rows = [*latency_rows(snapshot, layout), *speed_rows(snapshot, layout)]
    return as_text([*rows, prefix_row(snapshot, layout), step_row(snapshot, layout)])


def cache_panel(snapshot: RunSnapshot, width: int = 80, glyphs: Glyphs = UNICODE) -> Text:
    """The KV pool in its three states, prefix hits, preemptions and evictions."""
    layout = Layout(width, glyphs)
    return as_text([*kv_rows(snapshot, layout), prefix_row(snapshot, layout), pressure_row(snapshot, layout)])
