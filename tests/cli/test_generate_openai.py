"""OpenAI's batch files: the same envelope in and out, every field honoured or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program import Program
from test_generate import HI, read_lines, write_lines


def test_openai_batch_envelopes(nanoinfer: Program, tmp_path: Path) -> None:
    def line(name: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-x", **body}}

    source = write_lines(
        tmp_path / "in.jsonl",
        line("chat", {"messages": HI, "logprobs": True, "top_logprobs": 1}),
        line("raw", {"prompt": "abc"}, "/v1/completions"),
        line("bad", {"messages": HI, "tools": [{}]}),
        line("long", {"prompt": "x" * 5000}, "/v1/completions"),
    )
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out.jsonl")
    assert result.code == 3
    chat, raw, bad, long = read_lines(tmp_path / "out.jsonl")
    for record in (chat, raw, bad, long):
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["error"] is None
        assert record["id"].startswith("batch_req_")
    body = chat["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "fake")
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "HELLO", "refusal": None}
    assert choice["logprobs"]["content"][0] == {
        "token": "H",
        "logprob": -0.5,
        "bytes": [72],
        "top_logprobs": [{"token": "H", "logprob": -0.5, "bytes": [72]}],
    }
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert (raw["response"]["body"]["object"], raw["response"]["body"]["choices"][0]["text"]) == (
        "text_completion",
        "ABC",
    )
    for record, code in ((bad, "unsupported_field"), (long, "prompt_too_long")):
        assert record["response"]["status_code"] == 400
        error = record["response"]["body"]["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert "note: lines ask for 'gpt-x'; all are answered by fake." in result.err


def test_everything_that_an_openai_body_may_say_is_honoured(nanoinfer: Program, tmp_path: Path) -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": "END", "seed": 7, "presence_penalty": 0.1,
        "frequency_penalty": 0.2, "max_completion_tokens": 9, "logprobs": True, "top_logprobs": 2, "user": "u",
        "stream": False, "tools": None, "response_format": {"type": "text"}, "metadata": {"k": "v"},
    }  # fmt: skip
    content = [{"type": "text", "text": "hello"}]
    body = {"model": "m", "messages": [{"role": "system", "content": "x"}, {"role": "user", "content": content}]}
    line = {"custom_id": "i" * 100, "method": "POST", "url": "/v1/chat/completions", "body": body | options}
    result = nanoinfer("generate", "-f", write_lines(tmp_path / "in.jsonl", line))
    assert result.code == 0, result.err
    record = json.loads(result.out)
    assert record["custom_id"] == "i" * 100, "OpenAI's limit of 64 characters is not ours"
    assert [choice["index"] for choice in record["response"]["body"]["choices"]] == [0, 1]
    [(_, sampling, _)] = nanoinfer.llm.submitted
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.stop, sampling.seed) == (
        0.5,
        0.9,
        2,
        ("END",),
        7,
    )
    assert (sampling.max_tokens, sampling.logprobs) == (9, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": "/v1/embeddings"}, "url '/v1/embeddings' is not supported"),
        ({"url": "/v1/responses"}, "url '/v1/responses' is not supported"),
        ({"body": {"messages": HI, "stream": True}}, "'stream' is not supported"),
        ({"body": {"messages": HI, "tools": [{"type": "function"}]}}, "'tools' is not supported"),
        ({"body": {"messages": HI, "response_format": {"type": "json_object"}}}, "'response_format' is not supported"),
        ({"body": {"messages": HI, "logit_bias": {"1": 5}}}, "'logit_bias' is not supported"),
    ],
)
def test_what_is_not_honoured_is_named_on_its_line(
    nanoinfer: Program, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI}}
    result = nanoinfer("generate", "-f", write_lines(tmp_path / "in.jsonl", line, {**line, "custom_id": "b", **change}))
    assert result.code == 3
    assert f"line 2: {message}" in result.err
    good, bad = map(json.loads, result.out.splitlines())
    assert (good["response"]["status_code"], bad["response"]["status_code"], bad["error"]) == (200, 400, None)
    assert bad["response"]["body"]["error"]["message"].startswith(message)


def test_ids_of_batch_records_are_the_same_in_every_run(nanoinfer: Program, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HI}}
    source = write_lines(tmp_path / "in.jsonl", line)
    first, second = (json.loads(nanoinfer("generate", "-f", source).out) for _ in range(2))
    assert (first["id"], first["response"]["request_id"]) == (second["id"], second["response"]["request_id"])
