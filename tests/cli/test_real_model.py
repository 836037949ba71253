"""The commands with the real engine and the built-in model, as a person runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

QUESTION = "What is the capital of France?"


@pytest.fixture
def environment(smollm2_folder: Path) -> dict[str, str]:
    return {**os.environ, "NANOINFER_MODEL": str(smollm2_folder), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nanoinfer", *arguments]
    return subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=300)


def test_generate_answers_and_reuses_the_prefix(environment: dict[str, str], tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 12}
    (tmp_path / "in.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    out = tmp_path / "out.jsonl"
    done = run(environment, "generate", "-f", str(tmp_path / "in.jsonl"), "-o", str(out), "--num-blocks", "64")
    assert done.returncode == 0, done.stderr
    first, second = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert "Paris" in first["message"]["content"]
    assert second["message"] == first["message"]
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_chat_remembers_and_shows_its_cache_hits(environment: dict[str, str]) -> None:
    lines = f"{QUESTION}\nSay that again.\n"
    arguments = ("--temperature", "0", "--max-tokens", "12", "--num-blocks", "64", "--stats")
    done = run(environment, "chat", *arguments, stdin=lines)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    turns = re.findall(r"(\d+) tok · .* prompt (\d+) \((\d+) cached", done.stderr)
    (output, prompt, cached), (_, _, cached_again) = [tuple(map(int, turn)) for turn in turns]
    assert cached == 0
    assert cached_again == (prompt + output - 1) // 16 * 16  # all whole blocks; the last token has no KV yet


def test_bench_measures_random_weights_of_a_shape(environment: dict[str, str]) -> None:
    del environment["NANOINFER_MODEL"]
    sizes = ("--num-prompts", "3", "--input-len", "20", "--output-len", "4", "--num-blocks", "64")
    done = run(environment, "bench", "--load-format", "dummy", "--device", "cpu", *sizes, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (3, 60, 12)


def test_inspect_cache_finds_the_integrity_of_the_real_pool(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(f"{QUESTION}\nWhat is the capital of Spain?\n")
    arguments = ("--max-tokens", "2", "--num-blocks", "64", "--json")
    done = run(environment, "inspect-cache", "-f", str(tmp_path / "in.txt"), *arguments)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["integrity"]["ok"]
    # The prompts differ in their second block of 16 tokens.
    assert [request["cached_tokens"] for request in document["requests"]] == [0, 16]
