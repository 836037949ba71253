"""Output records: what a finished request or a bad line becomes in the results file, in the form of its input line."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from typing import Any

from nanoinfer.cli.prompts_file import BadLine, Entry, PromptRequest
from nanoinfer.engine.batch import TokenLogprobs
from nanoinfer.engine.outputs import CompletionOutput, RequestOutput, Usage
from nanoinfer.ui.text import visible

Decode = Callable[[list[int]], str]
Record = dict[str, Any]

# Legal in JSON and kept by a careful reader, but they end lines for some tools, and C1 controls drive terminals.
_RISKY = re.compile(r"[\x7f-\x9f\u2028\u2029]")


def to_json_line(record: Record) -> bytes:
    """The record as one line of UTF-8 JSON that no reader can take for two."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    return _RISKY.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8") + b"\n"


def to_plain_text(record: Record) -> bytes:
    """Only the answer of a flat record, or its answers with an empty line between, for a person at a terminal; nothing
    for an error."""
    texts = [choice.get("text", choice.get("message", {}).get("content")) for choice in record.get("choices", [record])]
    return b"\n".join(text.rstrip("\n").encode("utf-8", "replace") + b"\n" for text in texts if text is not None)


def for_terminal(render: Callable[[Record], bytes]) -> Callable[[Record], bytes]:
    """`render` for a terminal, which must show what a model writes and never obey it."""
    return lambda record: visible(render(record).decode("utf-8", "replace")).encode("utf-8", "replace")


def result_record(request: PromptRequest, output: RequestOutput, *, model: str, decode: Decode | None) -> Record:
    """The record of a request that ran; one that ended with an error keeps its partial text.

    `model` is the name to report; `decode` turns token ids into text for log probabilities, None without a tokenizer.
    """
    if request.form in ("chat", "completion"):
        return _openai_record(request, output, model, decode)
    choices = [_flat_choice(request, sample) for sample in output.outputs]
    record: Record = {request.id_key: request.id, "index": request.index}
    record |= choices[0] if len(choices) == 1 else {"choices": choices}
    record["usage"] = usage_fields(output.usage)
    record["timing"] = timing_fields(output)
    if request.metadata is not None:
        record["metadata"] = request.metadata
    record["error"] = _error_of(output)
    return record


def error_record(entry: Entry, code: str, message: str) -> Record:
    """The record of a line that could not run: OpenAI's status 400 in its envelope, `error` in the flat form."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    if entry.form in ("chat", "completion"):
        response = {"status_code": 400, "request_id": _request_id("req", entry), "body": {"error": error}}
        return _envelope(entry, response)
    return {entry.id_key: entry.id, "index": entry.index, "error": error}


def bad_line_record(line: BadLine) -> Record:
    """The error record of a line that was refused before the model was loaded."""
    return error_record(line, line.code, line.message)


def is_failure(record: Record) -> bool:
    """Whether a record reports a failed request, in either form."""
    return bool(record["response"]["status_code"] != 200) if "response" in record else record["error"] is not None


def failure_message(record: Record) -> str:
    """What a record that reports a failure says, in either form."""
    error = record["response"]["body"]["error"] if "response" in record else record["error"]
    return str(error["message"])


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timing_fields(output: RequestOutput) -> dict[str, Any]:
    """Latencies in milliseconds; null where the request never got so far. TPOT is of the first sample."""
    timing, first = output.timing, output.outputs[0]
    return {
        "queue_ms": _rounded(timing.queue_ms),
        "ttft_ms": _rounded(timing.ttft_ms),
        "tpot_ms": _rounded((first.timing or timing).tpot_ms(len(first.token_ids))),
        "e2e_ms": _rounded(timing.e2e_ms),
        "preemptions": sum(sample.preemptions for sample in output.outputs),
    }


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


def _flat_choice(request: PromptRequest, sample: CompletionOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {}
    if request.kind == "messages":
        choice["message"] = {"role": "assistant", "content": sample.text}
    else:
        choice["text"] = sample.text
    if request.kind == "ids":
        choice["token_ids"] = sample.token_ids
    choice["finish_reason"] = sample.finish_reason
    if sample.logprobs is not None:
        choice["logprobs"] = [{"token_id": p.token_id, "logprob": p.logprob, "top": p.top} for p in sample.logprobs]
    return choice


def _error_of(output: RequestOutput) -> dict[str, Any] | None:
    for sample in output.outputs:
        if sample.finish_reason == "error":
            code = sample.error.code if sample.error else "engine_error"
            message = sample.error.message if sample.error else "the engine ended this request."
            return {"message": message, "type": "engine_error", "param": None, "code": code}
    return None


def _request_id(prefix: str, entry: Entry) -> str:
    # Made from the id and not at random, so that a run that is resumed gives the same file as one that is not.
    return f"{prefix}_{hashlib.sha256(str(entry.id).encode()).hexdigest()[:32]}"


def _envelope(entry: Entry, response: dict[str, Any]) -> dict[str, Any]:
    return {"id": _request_id("batch_req", entry), "custom_id": entry.id, "response": response, "error": None}


def _openai_record(request: PromptRequest, output: RequestOutput, model: str, decode: Decode | None) -> dict[str, Any]:
    chat = request.form == "chat"
    body: dict[str, Any] = {
        "id": _request_id("chatcmpl" if chat else "cmpl", request).replace("_", "-", 1),
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_openai_choice(sample, chat, decode) for sample in output.outputs],
        "usage": usage_fields(output.usage),
        "timing": timing_fields(output),
    }
    error = _error_of(output)
    if error is not None:
        body["error"] = error
    status = 200 if error is None else 500
    return _envelope(request, {"status_code": status, "request_id": _request_id("req", request), "body": body})


def _openai_choice(sample: CompletionOutput, chat: bool, decode: Decode | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": sample.index}
    if chat:
        choice["message"] = {"role": "assistant", "content": sample.text, "refusal": None}
    else:
        choice["text"] = sample.text
    choice["logprobs"] = None
    if sample.logprobs is not None and decode is not None:
        choice["logprobs"] = (_chat_logprobs if chat else _completion_logprobs)(sample.logprobs, decode)
    choice["finish_reason"] = sample.finish_reason
    return choice


def _chat_logprobs(logprobs: list[TokenLogprobs], decode: Decode) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        text = decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        entry(p.token_id, p.logprob) | {"top_logprobs": [entry(token, value) for token, value in p.top]}
        for p in logprobs
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(logprobs: list[TokenLogprobs], decode: Decode) -> dict[str, Any]:
    tokens = [decode([p.token_id]) for p in logprobs]
    offsets, position = [], 0
    for token in tokens:
        offsets.append(position)
        position += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [p.logprob for p in logprobs],
        "top_logprobs": [{decode([token]): value for token, value in p.top} for p in logprobs],
        "text_offset": offsets,
    }
