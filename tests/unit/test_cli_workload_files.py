"""Workloads from files: ShareGPT, custom prompts and traces, as read and as drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.cli.bench_workload import digest
from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.workload_files import (
    CustomPrompt,
    TraceRequest,
    custom_requests,
    read_custom,
    read_sharegpt,
    read_trace,
    sharegpt_requests,
    trace_requests,
)
from nanoinfer.cli.workloads import BenchRequest
from nanoinfer.errors import UserError


def encode(prompt: Any) -> list[int]:
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_sharegpt_keeps_conversations_of_usable_length_in_vllms_order(tmp_path: Path) -> None:
    texts = [("q" * size, "a" * answer) for size, answer in [(10, 5), (3, 9), (20, 6), (1025, 9), (1000, 1049), (7, 3)]]
    data = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a in texts]
    data += [{"conversations": [{"value": "alone"}]}, {"id": 1}]  # type: ignore[list-item]
    conversations = read_sharegpt(write(tmp_path / "s.json", data))
    assert len(conversations) == 6
    requests = sharegpt_requests(conversations, 10, None, encode, seed=3)
    order = list(texts)
    random.Random(3).shuffle(order)
    usable = [(len(q), len(a)) for q, a in order if (len(q), len(a)) in ((10, 5), (20, 6))]
    assert [(len(r.token_ids), r.output_tokens) for r in requests] == usable
    assert len(sharegpt_requests(conversations, 1, None, encode, seed=3)) == 1
    given = sharegpt_requests(conversations, 10, LengthRange(7, 7), encode, seed=3)
    assert {(len(r.token_ids), r.output_tokens) for r in given} == {(10, 7), (20, 7), (7, 7), (1000, 7)}


def test_custom_prompts_keep_their_order_and_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", {"prompt": "ab", "output_tokens": 3}, "", {"prompt": [1, 2, 3]})
    prompts = read_custom(path)
    assert prompts == [CustomPrompt("ab", 3), CustomPrompt([1, 2, 3], None)]
    requests = custom_requests(prompts, 2, LengthRange(9, 9), encode, seed=0)
    assert requests == [BenchRequest([97, 98], 3), BenchRequest([1, 2, 3], 9)]
    [messages] = read_custom(write(path, {"messages": [{"role": "user", "content": "hi"}]}))
    assert messages.prompt == [{"role": "user", "content": "hi"}]


def test_a_line_of_a_custom_file_ends_at_a_newline_only(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0bd"
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n" + '{"prompt": "e"}', encoding="utf-8")
    assert read_custom(path) == [CustomPrompt(text, None), CustomPrompt("e", None)]


def test_a_trace_keeps_arrivals_lengths_and_shared_blocks(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 3000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]},
        {"timestamp": 1000, "input_length": 1100, "output_length": 2, "hash_ids": [7, 9]},
        {"timestamp": 4500.5, "input_length": 5, "output_length": 1},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", *lines))
    assert [request.arrival for request in trace] == pytest.approx([0.0, 2.0, 3.5005])
    assert trace[0] == TraceRequest(0.0, 1100, 2, (7, 9))
    first, second, third = trace_requests(trace, 3, vocab_size=50, seed=0)
    assert [len(r.token_ids) for r in (first, second, third)] == [1100, 600, 5]
    assert first.token_ids[:512] == second.token_ids[:512]
    assert first.token_ids[512:600] != second.token_ids[512:]
    assert (second.arrival, second.output_tokens) == (2.0, 4)
    assert trace_requests(trace, 1, 50, seed=1)[0].token_ids != first.token_ids
    assert max(first.token_ids) < 50


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (read_sharegpt, "{", "is not JSON"),
        (read_sharegpt, "{}", "is not a ShareGPT file"),
        (read_sharegpt, '[{"conversations": []}]', "no conversation of two turns"),
        (read_custom, "", "is empty"),
        (read_custom, '{"prompt": "a"}\n{"prompt": ""}', "line 2: it needs 'prompt'"),
        (read_custom, '{"prompt": "a", "output_tokens": 0}', "line 1: 'output_tokens' must be a whole number"),
        (read_custom, "[1]", "line 1 is not a JSON object"),
        (read_custom, "nope", "line 1 is not JSON"),
        (read_trace, '{"input_length": 3, "output_length": 3}', "line 1: it needs 'timestamp'"),
        (read_trace, '{"timestamp": 0, "input_length": 3}', "line 1: 'output_length' must be a whole"),
        (read_trace, '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": "x"}', "'hash_ids' must be"),
    ],
)
def test_bad_files_are_refused_with_the_place(
    tmp_path: Path, reader: Callable[[Path], Any], content: str, message: str
) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        reader(path)


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(b"\xff\xfe\x00")
    for name, reason in (("none", "No such file"), ("raw", "it is not UTF-8")):
        with pytest.raises(UserError, match=f"cannot read .*{name}.*{reason}"):
            read_custom(tmp_path / name)


def test_a_digest_stands_for_tokens_lengths_and_arrivals() -> None:
    requests = [BenchRequest([1, 2], 3), BenchRequest([4], 5, arrival=1.0)]
    assert digest(requests) == digest(list(requests))
    others = [
        [BenchRequest([1, 2], 3), BenchRequest([4], 5, arrival=2.0)],
        [BenchRequest([1], 3), BenchRequest([2, 4], 5, arrival=1.0)],
        [BenchRequest([1, 2], 4), BenchRequest([4], 5, arrival=1.0)],
    ]
    assert len({digest(requests), *map(digest, others)}) == 4
