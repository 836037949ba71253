"""Keeps what is typed while a screen is being drawn from appearing in the middle of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def typing_hidden() -> Iterator[None]:
    """The terminal of standard input does not show keys; they wait for whoever reads next. Signals are as ever.

    Without a terminal, and on Windows, nothing changes. A process that is killed meanwhile (SIGKILL) leaves a terminal
    that shows no keys, until `stty echo` or `reset`.
    """
    try:
        import termios
    except ImportError:
        yield
        return
    try:
        before, hidden = termios.tcgetattr(sys.stdin), termios.tcgetattr(sys.stdin)
    except (OSError, ValueError, AttributeError, termios.error):  # closed, replaced, or no terminal
        yield
        return
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
