"""Getting a model: which one is meant, where its files are, and how its weights reach the decoder."""

from __future__ import annotations

from collections.abc import Callable

# (stage, bytes done, bytes in all; 0 = unknown). Stages: "download", "import", "load",
# and a sentence with 0 and 0 for a wait of unknown length. Called on the caller's thread,
# except for "download", where the hub client reports from its own threads.
Notify = Callable[[str, int, int], None]


def silent(stage: str, done: int, total: int) -> None:
    """The Notify that reports nothing."""
