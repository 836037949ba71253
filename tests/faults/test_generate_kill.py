"""kill -9 at any moment of `generate`: what was finished stays, and going on gives the file of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from killed_runs import start

KILLS = 20
FAILED_REQUESTS = 3  # the exit code of every whole run here: some lines fail on purpose
KILLED = -signal.SIGKILL


def write_prompts(path: Path, flat: int, rounds: int) -> Path:
    """Lines of every form, some of which fail."""
    lines: list[dict[str, Any]] = [
        {"id": f"flat-{i}", "prompt": f"é漢😀\u2028 {i} " * (i % 7 + 1), "metadata": {"n": i}} for i in range(flat)
    ]
    others = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}),
        ("/v1/completions", {"prompt": "once", "n": 2}),
        ("/v1/completions", {"prompt": "x" * 3000}),
        ("/v1/embeddings", {"input": "x"}),
    ]
    for i, (url, body) in enumerate(others * rounds):
        lines.append({"custom_id": f"batch-{i}", "method": "POST", "url": url, "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def comparable(path: Path) -> list[dict[str, Any]]:
    """The records without what may differ: timing (and preemptions in it), cached tokens."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    for record in records:
        body = record["response"]["body"] if "response" in record else record
        body.pop("created", None)
        if "timing" in body:
            assert set(body.pop("timing")) == {"queue_ms", "ttft_ms", "tpot_ms", "e2e_ms", "preemptions"}
            del body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return records


def results_in(partial: Path) -> list[bytes]:
    """The whole result lines of a partial file, in any state."""
    try:
        content = partial.read_bytes()
    except FileNotFoundError:  # not there yet, or no longer
        return []
    return [line for line in content.splitlines(keepends=True)[1:] if line.endswith(b"\n")]


def finish(arguments: list[str], log: Path) -> None:
    """Run to the end, undisturbed."""
    process = start(arguments, log)
    process.join(120)
    assert process.exitcode == FAILED_REQUESTS, log.read_text()


def test_twenty_kills_at_random_moments(tmp_path: Path) -> None:
    source, log = write_prompts(tmp_path / "in.jsonl", 40, 2), tmp_path / "log"
    out, partial, whole = (tmp_path / name for name in ("out.jsonl", "out.jsonl.partial", "whole.jsonl"))
    command = ["generate", "-f", str(source), "--temperature", "0", "--max-num-seqs", "4", "--max-tokens", "24", "-o"]
    finish([*command, str(whole)], log)

    draw, kills, torn_work = random.Random(0), 0, 0
    while kills < KILLS:
        before = results_in(partial)
        process = start([*command, str(out), "--resume"], log)
        # After some more results and a moment, which may be in the start and, with few lines left, at the very end.
        wanted = len(before) + draw.randrange(8)
        while process.is_alive() and len(results_in(partial)) < wanted:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        process.kill()
        process.join()
        assert process.exitcode in (KILLED, FAILED_REQUESTS), log.read_text()
        kills += process.exitcode == KILLED
        if out.exists():
            partial.unlink(missing_ok=True)  # it died between the last two steps, or not at all
            assert comparable(out) == comparable(whole)
            out.unlink()
        else:
            assert results_in(partial)[: len(before)] == before, "a finished result is lost"
            torn_work += len(results_in(partial)) > len(before)
    assert torn_work >= KILLS // 2, "too few deaths in the middle of the work to say anything"
    finish([*command, str(out), "--resume"], log)
    assert comparable(out) == comparable(whole)
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "log", "out.jsonl", "whole.jsonl"]


def test_a_kill_at_every_point_where_files_change(tmp_path: Path) -> None:
    source, log = write_prompts(tmp_path / "in.jsonl", 2, 1), tmp_path / "log"
    out, partial, whole = (tmp_path / name for name in ("out.jsonl", "out.jsonl.partial", "whole.jsonl"))
    command = ["generate", "-f", str(source), "--temperature", "0", "-o"]
    finish([*command, str(whole)], log)
    point, torn = 0, 0
    while True:
        process = start([*command, str(out)], log, die_at=point)
        process.join(60)
        if process.exitcode != KILLED:
            break
        torn += partial.exists() and not partial.read_bytes().endswith(b"\n")
        again = start([*command, str(out), "--resume"], log, die_at=5)  # after its first new result, if there is one
        again.join(60)
        for line in results_in(partial):
            assert json.loads(line)["record"], f"at point {point}: a result was written onto a torn line"
        resumed = start([*command, str(out), "--resume"], log)
        resumed.join(60)
        if out.exists() and not partial.exists() and resumed.exitcode == 2:
            pass  # it died after its very last step
        else:
            assert resumed.exitcode == FAILED_REQUESTS, f"at point {point}: {log.read_text()}"
        assert comparable(out) == comparable(whole), f"at point {point}"
        assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "log", "out.jsonl", "whole.jsonl"]
        out.unlink()
        point += 1
    assert process.exitcode == FAILED_REQUESTS
    assert point >= 3 * 7, "seven lines are written, with three points each"
    assert torn >= 7
