"""docs/pitfalls.md names only tests that exist, and every row of its tables names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "pitfalls.md").read_text()


def sections() -> dict[str, list[str]]:
    """The rows of the tables by the nearest heading, without the heads."""
    found: dict[str, list[str]] = {}
    for part in re.split(r"^##+ ", TEXT, flags=re.M)[1:]:
        rows = [line for line in part.split("\n") if line.startswith("|") and not line.startswith("|--")]
        found[part.partition("\n")[0]] = [row for row in rows if not row.endswith("| test |")]
    return found


def test_every_test_named_in_the_list_exists():
    named = re.findall(r"`(test_\w+)`", TEXT)
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (\w+)", file.read_text(), re.M)
    }
    assert len(named) > 200
    assert set(named) <= defined, set(named) - defined


def test_every_row_has_a_symptom_its_origin_and_a_test():
    tables = sections()
    assert [name for name, rows in tables.items() if not rows] == ["The command line", "Not so here, and why"]
    for row in (row for rows in tables.values() for row in rows):
        symptom, origin, tests = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1])
        assert symptom, row
        assert origin, row
        assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", tests), row


def test_no_symptom_is_listed_twice_under_a_heading():
    for rows in sections().values():
        symptoms = [row.split("|")[1] for row in rows if not re.match(r"\| \d", row)]
        assert len(symptoms) == len(set(symptoms))
