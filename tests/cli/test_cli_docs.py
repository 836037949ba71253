"""docs/cli.md is what its script makes of the program."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("columns", ["40", "200"])
def test_docs_are_those_of_the_program(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    made = runpy.run_path(str(ROOT / "scripts" / "cli_docs.py"))["document"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == made, "run python scripts/cli_docs.py"
    assert all(f"## nanoinfer {name}\n" in made for name in ("chat", "generate", "bench", "inspect-cache"))
