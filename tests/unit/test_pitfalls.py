"""docs/pitfalls.md names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_named_in_the_list_exists():
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "pitfalls.md").read_text())
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (\w+)", file.read_text(), re.M)
    }
    assert len(named) > 60
    assert set(named) <= defined, set(named) - defined
