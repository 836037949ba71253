"""The example that the README starts with."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.cli.prompts_file import PromptRequest, parse_prompts
from nanoinfer.config import SamplingParams

PROMPTS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def test_the_example_prompts_are_twelve_valid_and_varied_lines() -> None:
    entries = parse_prompts(PROMPTS.read_bytes(), "jsonl", SamplingParams(max_tokens=512))
    requests = [entry for entry in entries if isinstance(entry, PromptRequest)]
    assert len(requests) == len(entries) == 12
    assert {type(request.prompt) for request in requests} == {str, list}
    assert len({request.sampling.get("temperature") for request in requests}) > 3
