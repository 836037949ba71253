"""`nanoinfer inspect-cache` on files of earlier runs: cache snapshots, and recordings to step through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program import Program
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from nanoinfer.cli.cache_browser import Walk, application

PREFIX = "the same beginning of all prompts, 44 letters"[:44]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    lines = [{"id": f"p{i}", "prompt": f"{PREFIX}{i} and an end"} for i in range(4)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"id": "n", "prompt": "other", "n": 2}]))
    return path


@pytest.fixture
def recorded(nanoinfer: Program, prompts: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A snapshot and a recording that `generate` wrote."""
    snapshot, events = tmp_path / "cache.json", tmp_path / "events.jsonl"
    result = nanoinfer(
        "generate", "-f", prompts, "-o", tmp_path / "out.jsonl", "--cache-snapshot", snapshot, "--events", events,
        "--num-blocks", "200",
    )  # fmt: skip
    assert result.code == 0, result.err
    nanoinfer.llm = None
    return snapshot, events


def document(nanoinfer: Program, *arguments: str | Path) -> dict[str, Any]:
    result = nanoinfer("inspect-cache", *arguments, "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert isinstance(found, dict)
    return found


def test_a_snapshot_is_reported_without_an_engine(nanoinfer: Program, recorded: tuple[Path, Path]) -> None:
    snapshot, _ = recorded
    result = nanoinfer("inspect-cache", "--cache-snapshot", snapshot)
    assert (result.code, nanoinfer.llm) == (0, None)
    for text in (
        "200 blocks of 4 tokens of fake, float32",
        "tokens 0-43 (11 blocks), 3 hits, idle ",
        "(11 blocks), 3 hits saved 132 tokens",
        "next out    blocks ",
        "integrity   ok",
    ):
        assert text in result.out
    assert PREFIX[:10] not in result.out
    assert max(map(len, result.out.splitlines())) <= 80
    in_ascii = nanoinfer("inspect-cache", "--cache-snapshot", snapshot, "--ascii").out
    assert in_ascii.isascii()
    assert "# active   = cached" in in_ascii
    found = document(nanoinfer, "--cache-snapshot", snapshot)
    assert found["block_map"].count("c") == found["end"]["cached"] > 11
    assert found["engine"]["model"] == "fake"


def test_a_changed_snapshot_is_found_out(nanoinfer: Program, recorded: tuple[Path, Path]) -> None:
    snapshot, _ = recorded
    data = json.loads(snapshot.read_text())
    published = next(block for block in data["blocks"] if block["digest"])
    published["token_ids"][0] += 1
    snapshot.write_text(json.dumps(data))
    result = nanoinfer("inspect-cache", "--cache-snapshot", snapshot)
    assert result.code == 1
    assert f"block {published['block']}: its digest is not that of its tokens" in result.out
    assert "does not hold together" in result.err


def test_text_of_a_snapshot_needs_its_model(nanoinfer: Program, recorded: tuple[Path, Path], tmp_path: Path) -> None:
    result = nanoinfer("inspect-cache", tmp_path / "none", "--cache-snapshot", recorded[0], "--show-text")
    assert result.code == 2
    assert "--show-text needs the model's tokenizer; name its folder with -m." in " ".join(result.err.split())


def test_a_recording_ends_with_all_requests(nanoinfer: Program, recorded: tuple[Path, Path]) -> None:
    _, events = recorded
    result = nanoinfer("inspect-cache", "--events", events)
    assert (result.code, nanoinfer.llm) == (0, None)
    assert max(map(len, result.out.splitlines())) <= 80
    for text in (
        "recording   events.jsonl, fake",
        "of 200 blocks of 4 tokens",
        "integrity   ok",
        "0 running, 0 waiting",
    ):
        assert text in result.out
    found = document(nanoinfer, "--events", events)
    assert found["position"] == found["steps"]
    # Prompts 2 to 4 hit the common prefix, the second sample its sibling's block.
    assert sorted(request["cached_tokens"] for request in found["requests"]) == [0, 0, 4, 44, 44, 44]
    assert found["so_far"]["cached_tokens"] == sum(request["cached_tokens"] for request in found["requests"])
    assert found["so_far"]["prompt_tokens"] == sum(request["prompt_tokens"] for request in found["requests"])


def test_every_step_can_be_shown(nanoinfer: Program, recorded: tuple[Path, Path]) -> None:
    _, events = recorded
    last = document(nanoinfer, "--events", events, "--step", "-1")
    first = document(nanoinfer, "--events", events, "--step", "1")
    assert (first["position"], first["event"]["kind"], last["position"]) == (1, "prefill", last["steps"])
    assert first["event"]["blocks_active"] > 0 == last["event"]["blocks_active"]
    out = nanoinfer("inspect-cache", "--events", events, "--step", "2").out
    assert f"step        2 of {last['steps']}, mixed" in out
    for step in ("0", "99", "-99"):
        result = nanoinfer("inspect-cache", "--events", events, "--step", step)
        assert result.code == 2
        assert f"has steps 1 to {last['steps']}; there is no step {step}" in result.err


def test_a_recording_that_contradicts_itself(nanoinfer: Program, recorded: tuple[Path, Path]) -> None:
    _, events = recorded
    lines = events.read_text().splitlines(keepends=True)
    step = json.loads(lines[2])
    step["blocks_free"] += 1
    step["emitted"] = step["emitted"][:-1]
    lines[2] = json.dumps(step) + "\n"
    events.write_text("".join([*lines, '{"torn']))
    result = nanoinfer("inspect-cache", "--events", events)
    assert result.code == 1
    assert "step 2: active, cached and free are" in result.out
    assert "BROKEN, 2 problems" in result.out
    assert "the last line" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "1"), "--step shows a step of an earlier run"),
        (("--events", "a", "--cache-snapshot", "b"), "both given to be read"),
        (("--events", "/none"), "cannot read /none"),
        (("--cache-snapshot", "/none"), "cannot read the cache snapshot /none: No such file or directory."),
        (("--cache-snapshot", "/none", "--top", "-4"), "--top is -4; it must be at least 0."),
    ],
)
def test_bad_input(nanoinfer: Program, arguments: tuple[str, ...], message: str) -> None:
    result = nanoinfer("inspect-cache", *arguments)
    assert (result.code, nanoinfer.llm) == (2, None)
    assert message in " ".join(result.err.split())


def test_keys_walk_through_the_steps() -> None:
    right, left, up, down, home, end = "\x1b[C", "\x1b[D", "\x1b[5~", "\x1b[6~", "\x1b[H", "\x1b[F"
    for keys, position in (
        (right * 3 + left, 3),
        (left, 1),
        (down + right, 12),
        (down * 9, 50),
        (end + left, 49),
        (end + up, 40),
        (right * 4 + home, 1),
    ):
        walk = Walk(50)
        with create_pipe_input() as typed:
            typed.send_text(keys + "q")
            view = application(walk, lambda: "a frame")
            view.input, view.output = typed, DummyOutput()
            view.run()
        assert walk.position == position
