"""Workloads from files: ShareGPT conversations, custom JSONL prompts, and traces with arrival times."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoinfer.cli.lengths import LengthRange
from nanoinfer.cli.workloads import BenchRequest
from nanoinfer.errors import UserError

Encode = Callable[[Any], list[int]]  # text, token ids or messages -> token ids

# vLLM's rules for ShareGPT, so that figures compare: conversations that are very short or long are left out.
SHAREGPT_LEAST, SHAREGPT_MOST_PROMPT, SHAREGPT_MOST_TOTAL = 4, 1024, 2048
# Tokens that one hash id of a trace stands for (the Mooncake traces).
TRACE_BLOCK = 512


@dataclass(frozen=True)
class ShareGPTConversation:
    """A ShareGPT conversation's first question, and the answer whose length is asked for again."""

    question: str
    answer: str


@dataclass(frozen=True)
class CustomPrompt:
    """A line of a custom file; None leaves the answer's length to --output-len."""

    prompt: Any  # text, token ids or messages
    output_tokens: int | None


@dataclass(frozen=True)
class TraceRequest:
    """A line of a trace: lengths in tokens, and the ids of the prompt's blocks, equal where the content was."""

    arrival: float  # seconds after the first request
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


# -- reading: before the model is loaded -------------------------------------------------------------------------------


def read_sharegpt(path: Path) -> list[ShareGPTConversation]:
    """The conversations with at least two turns; UserError if the file is not ShareGPT's JSON list."""
    try:
        data = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); sharegpt is one list of conversations.") from error
    if not isinstance(data, list):
        raise UserError(f"{path} is not a ShareGPT file, which is one list of conversations.")
    found = []
    for entry in data:
        turns = entry.get("conversations", []) if isinstance(entry, dict) else []
        texts = [str(turn["value"]) for turn in turns[:2] if isinstance(turn, dict) and "value" in turn]
        if len(texts) == 2:
            found.append(ShareGPTConversation(*texts))
    if not found:
        raise UserError(f"{path} has no conversation of two turns (conversations: [{{value}}, {{value}}, ...]).")
    return found


def read_custom(path: Path) -> list[CustomPrompt]:
    """JSONL of {"prompt": text or ids, "output_tokens"?: n}, or "messages" in place of "prompt"."""
    found = []
    for place, line in _json_lines(path):
        prompt = line.get("prompt", line.get("messages"))
        is_ids = isinstance(prompt, list) and all(isinstance(item, int) for item in prompt)
        is_messages = isinstance(prompt, list) and all(isinstance(item, dict) for item in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids or is_messages):
            raise UserError(f"{place}: it needs 'prompt' (text or token ids) or 'messages', and not an empty one.")
        tokens = line.get("output_tokens")
        found.append(CustomPrompt(prompt, None if tokens is None else _whole(tokens, "output_tokens", place)))
    return found


def read_trace(path: Path) -> list[TraceRequest]:
    """JSONL of {"timestamp": milliseconds, "input_length", "output_length", "hash_ids"?}, as the Mooncake traces."""
    found = []
    for place, line in _json_lines(path):
        timestamp, ids = line.get("timestamp"), line.get("hash_ids", [])
        if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or timestamp < 0:
            raise UserError(f"{place}: it needs 'timestamp', the arrival in milliseconds.")
        if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
            raise UserError(f"{place}: 'hash_ids' must be a list of whole numbers.")
        inputs, outputs = (_whole(line.get(name), name, place) for name in ("input_length", "output_length"))
        found.append(TraceRequest(timestamp / 1000, inputs, outputs, tuple(ids)))
    found.sort(key=lambda request: request.arrival)
    first = found[0].arrival
    return [TraceRequest(r.arrival - first, r.input_tokens, r.output_tokens, r.hash_ids) for r in found]


def _whole(value: Any, name: str, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{place}: '{name}' must be a whole number of at least 1.")
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"cannot read {path}: {reason}; --dataset-path names the file of the workload.") from error


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, the object) of every line that is not blank; UserError if there is none.

    Lines end at "\\n" only: U+2028 and U+0085 are legal inside JSON strings.
    """
    found = False
    for number, text in enumerate(_read(path).split("\n"), start=1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        try:
            line = json.loads(text)
        except ValueError as error:
            raise UserError(f"{place} is not JSON: {error}.") from error
        if not isinstance(line, dict):
            raise UserError(f"{place} is not a JSON object.")
        found = True
        yield place, line
    if not found:
        raise UserError(f"{path} is empty; there is nothing to run.")


# -- drawing: when the tokenizer is there ------------------------------------------------------------------------------


def sharegpt_requests(
    conversations: list[ShareGPTConversation], count: int, outputs: LengthRange | None, encode: Encode, seed: int
) -> list[BenchRequest]:
    """Up to `count` conversations in a shuffled order; the answers' own lengths unless `outputs` are given."""
    rng = random.Random(seed)
    shuffled = list(conversations)
    rng.shuffle(shuffled)
    requests: list[BenchRequest] = []
    for conversation in shuffled:
        if len(requests) == count:
            break
        prompt = encode(conversation.question)
        tokens = rng.randint(outputs.low, outputs.high) if outputs else len(encode(conversation.answer))
        too_short = len(prompt) < SHAREGPT_LEAST or (outputs is None and tokens < SHAREGPT_LEAST)
        if too_short or len(prompt) > SHAREGPT_MOST_PROMPT or len(prompt) + tokens > SHAREGPT_MOST_TOTAL:
            continue
        requests.append(BenchRequest(prompt, tokens))
    return requests


def custom_requests(
    prompts: list[CustomPrompt], count: int, outputs: LengthRange, encode: Encode, seed: int
) -> list[BenchRequest]:
    """The first `count` prompts in the order of the file."""
    rng = random.Random(seed)
    return [
        BenchRequest(encode(each.prompt), each.output_tokens or rng.randint(outputs.low, outputs.high))
        for each in prompts[:count]
    ]


def trace_requests(trace: list[TraceRequest], count: int, vocab_size: int, seed: int) -> list[BenchRequest]:
    """The first `count` arrivals. Prompts are random tokens, the same ones wherever a block's hash id is the same."""
    requests = []
    for number, each in enumerate(trace[:count]):
        blocks = [(f"{seed} block {hash_id}", TRACE_BLOCK) for hash_id in each.hash_ids]
        tokens: list[int] = []
        for name, size in [*blocks, (f"{seed} own {number}", each.input_tokens)]:  # what no hash id covers is its own
            if len(tokens) < each.input_tokens:
                rng = random.Random(name)
                tokens += [rng.randrange(vocab_size) for _ in range(min(size, each.input_tokens - len(tokens)))]
        requests.append(BenchRequest(tokens, each.output_tokens, each.arrival))
    return requests
