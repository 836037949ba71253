"""Prompts files: every form that is accepted, every mistake with its message, nothing ignored in silence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nanoinfer.cli.prompts_file import BadLine, Entry, PromptRequest, parse_prompts, prompts_from_texts, sniff
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError

DEFAULTS = SamplingParams(max_tokens=512)


def parse(*lines: Any, kind: Any = "jsonl") -> list[Entry]:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    return parse_prompts("\n".join(texts).encode(), kind, DEFAULTS)


def one(line: Any) -> PromptRequest:
    [entry] = parse(line)
    assert isinstance(entry, PromptRequest), entry
    return entry


def refused(line: Any) -> BadLine:
    [entry] = parse(line)
    assert isinstance(entry, BadLine), entry
    return entry


def batch(body: dict[str, Any], url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **more}


HI = [{"role": "user", "content": "hi"}]


def test_flat_lines_take_text_ids_or_messages_with_sampling_options() -> None:
    text, ids, chat = parse(
        {"prompt": "once", "temperature": 0, "seed": 7},
        {"id": "b", "prompt": [1, 2]},
        {"custom_id": "c", "messages": HI, "max_tokens": 3, "stop": ["x"], "metadata": {"k": 1}},
    )
    assert isinstance(text, PromptRequest)
    assert isinstance(ids, PromptRequest)
    assert isinstance(chat, PromptRequest)
    assert (text.id, text.id_key, text.prompt, text.sampling) == (
        "line-1",
        "custom_id",
        "once",
        {"temperature": 0, "seed": 7},
    )
    assert (ids.id, ids.id_key, ids.prompt, ids.form) == ("b", "id", [1, 2], "flat")
    assert (chat.id, chat.id_key, chat.prompt) == ("c", "custom_id", HI)
    assert chat.sampling == {"max_tokens": 3, "stop": ["x"]}
    assert chat.metadata == {"k": 1}
    assert [entry.index for entry in (text, ids, chat)] == [0, 1, 2]


def test_openai_batch_lines_of_both_kinds() -> None:
    chat = one(batch({"model": "gpt-x", "messages": HI, "max_completion_tokens": 9, "top_p": 0.5, "stream": False}))
    assert (chat.id, chat.id_key, chat.form, chat.model) == ("a", "custom_id", "chat", "gpt-x")
    assert chat.sampling == {"max_tokens": 9, "top_p": 0.5}
    raw = one(batch({"model": "m", "prompt": "once", "logprobs": 2}, url="/v1/completions"))
    assert (raw.form, raw.prompt, raw.sampling) == ("completion", "once", {"logprobs": 2})


@pytest.mark.parametrize(
    ("body", "sampling"),
    [
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"logprobs": None, "temperature": None}, {}),
    ],
)
def test_openai_chat_logprobs_and_nulls(body: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert one(batch({"messages": HI, **body})).sampling == sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("logit_bias", {}),
        ("response_format", {"type": "text"}),
        ("n", 1),
        ("echo", False),
        ("user", "u"),
    ],
)
def test_fields_that_change_nothing_are_accepted(field: str, value: Any) -> None:
    assert one({"messages": HI, field: value})


@pytest.mark.parametrize(
    "field",
    ["tools", "tool_choice", "response_format", "logit_bias", "stream", "functions", "guided_json", "best_of"],
)
def test_fields_that_nanoinfer_does_not_honour_are_refused_by_name(field: str) -> None:
    bad = refused({"messages": HI, field: {"type": "something"}})
    assert bad.code == "unsupported_field"
    assert bad.message == f"'{field}' is not supported by nanoinfer; remove it."


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "x", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "x", "zebra": 1}, "unknown field 'zebra'; put notes of your own under 'metadata'."),
        ({"prompt": ""}, "the prompt is empty; write something."),
        ({"prompt": []}, "the prompt is empty; write something."),
        ({"messages": []}, "'messages' is empty; it needs at least one message."),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0; it must be a whole number from 1 to 2147483647."),
        ({"prompt": "x", "max_tokens": True}, "max_tokens is True; it must be a whole number from 1 to 2147483647."),
        ({"prompt": "x", "min_tokens": 2**31}, "min_tokens is 2147483648; it must be a whole number from 0 to "),
        (
            {"prompt": "x", "top_k": 2**31},
            "top_k is 2147483648; it must be a whole number from 0 to 2147483647 (0 is off).",
        ),
        ('{"prompt": "x", "temperature": 1e999}', "temperature is inf; it must be a number from 0 to 100."),
        ({"prompt": "x", "min_tokens": 600}, "min_tokens (600) is above max_tokens (512)."),
        ({}, "neither 'prompt' (text or a list of token ids) nor 'messages' is given."),
        ({"prompt": "x", "messages": HI}, "both 'prompt' and 'messages' are given; keep one of them."),
        ({"prompt": ["a", "b"]}, "'prompt' holds several prompts; give each its own line."),
        ({"prompt": [1, -1]}, "'prompt' must be text or a list of token ids (whole numbers of at least 0)."),
        ({"prompt": 3}, "'prompt' must be text or a list of token ids."),
        ({"id": "", "prompt": "x"}, "'id' must be a string that is not empty, or a whole number."),
        ({"id": 1, "custom_id": 1, "prompt": "x"}, "'id' and 'custom_id' are both given; keep one of them."),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0] has the role 'boss'; use one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'image_url'"),
        ({"messages": [{"role": "user", "content": "x", "audio": 1}]}, "messages[0]: 'audio' is not supported"),
        ({"max_tokens": 1, "max_completion_tokens": 1, "prompt": "x"}, "'max_tokens' and 'max_completion_tokens'"),
        ('{"prompt": "x", "metadata": {"a": 1e999}}', "'metadata' holds a number that is too large."),
        (batch({"messages": HI}, url="/v1/embeddings"), "url '/v1/embeddings' is not supported"),
        (batch({"prompt": "x"}), "'prompt' does not belong to /v1/chat/completions."),
        (batch({"messages": HI}, extra=1), "unknown field 'extra' beside 'body'"),
        (batch({"messages": HI}, method="GET"), "method 'GET' is not supported"),
        ({"method": "POST", "url": "/v1/chat/completions", "body": {}}, "'custom_id' is missing"),
        ("[1]", "the line must hold a JSON object, not a list."),
        ('{"prompt": NaN}', "NaN is not a JSON value."),
        ('{"prompt": "a", "prompt": "b"}', "the field 'prompt' is given twice."),
        ('{"prompt": "a"', "not JSON: Expecting ',' delimiter at column 15."),
        ('{"prompt": "a', "not JSON: Unterminated string starting at column 12."),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "x", "metadata": ' + "[" * 100 + "]" * 100 + "}", "are nested more than 100 levels deep."),
        ("[" * 100_000, "not JSON that can be read"),
        ('{"max_tokens": ' + "9" * 5000 + "}", "not JSON that can be read"),
    ],
)
def test_mistakes_are_named(line: Any, message: str) -> None:
    assert message in refused(line).message


def test_a_bad_line_keeps_its_id_and_form() -> None:
    flat, chat = refused({"id": "q7", "prompt": ""}), refused(batch({"messages": HI, "tools": [1]}))
    assert (flat.id, flat.id_key, flat.form) == ("q7", "id", "flat")
    assert (chat.id, chat.id_key, chat.form) == ("a", "custom_id", "chat")
    assert refused("nonsense").id == "line-1"


def test_duplicate_ids_are_refused_with_both_lines() -> None:
    first, second, third = parse(
        {"id": "a", "prompt": "x"}, "", {"id": "a", "prompt": "y"}, {"id": "line-4", "prompt": "z"}
    )
    assert isinstance(first, PromptRequest)
    assert isinstance(second, BadLine)
    assert (second.line, second.code) == (3, "duplicate_id")
    assert "already used on line 1" in second.message
    assert isinstance(third, PromptRequest)


def test_generated_ids_count_as_duplicates_too() -> None:
    first, second = parse({"id": "line-2", "prompt": "x"}, {"prompt": "y"})
    assert isinstance(first, PromptRequest)
    assert isinstance(second, BadLine)


def test_the_record_of_a_duplicate_has_an_id_of_its_own() -> None:
    """A reader that looks answers up by id found the error instead of the answer."""
    entries = parse(
        {"id": "line-3", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "a", "prompt": "z"}, batch({"messages": HI})
    )
    assert [entry.id for entry in entries] == ["line-3", "a", "line-3-again", "line-4"]
    assert [entry.id_key for entry in entries[2:]] == ["id", "custom_id"]


def test_lines_may_be_nested_as_deep_as_records_can_be_written() -> None:
    """Depths near Python's own limit were read, and ended the run when their record was written."""
    for depth in (99, 100, 330, 900, 970, 990, 1000):
        [entry] = parse('{"prompt": "x", "metadata": ' + '{"a":' * depth + "1" + "}" * (depth + 1))
        assert isinstance(entry, PromptRequest if depth < 100 else BadLine)
    assert one({"prompt": [1, 2], "metadata": [[{}]] * 200})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ('[{"prompt": "a"}]', "the prompts are a JSON list; .* on a line of its own .jq -c '"),
        ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n', "the prompts are a JSON list"),
        ('{\n"prompt": "a"\n}\n', "are one JSON object over several lines; .* .jq -c . does that"),
    ],
)
def test_a_document_is_refused_as_a_whole(document: str, message: str) -> None:
    """Of a list over several lines, the one line that happened to be an object was answered."""
    with pytest.raises(UserError, match=message):
        parse_prompts(document.encode(), "jsonl", DEFAULTS)


def test_lines_end_at_newline_only_and_blank_lines_are_skipped() -> None:
    entries = parse_prompts('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n\n   \n{"prompt": "d"}'.encode(), "jsonl", DEFAULTS)
    assert [entry.line for entry in entries] == [1, 4]
    first = entries[0]
    assert isinstance(first, PromptRequest)
    assert first.prompt == "a\u2028b\u0085c"


def test_joined_files_keep_a_byte_order_mark_in_the_middle() -> None:
    entries = parse_prompts(b'{"prompt": "a"}\n\xef\xbb\xbf{"prompt": "b"}\n\xef\xbb\xbf\n', "jsonl", DEFAULTS)
    assert [entry.prompt for entry in entries if isinstance(entry, PromptRequest)] == ["a", "b"]
    assert len(entries) == 2


def test_a_prompt_option_of_other_bytes_is_refused() -> None:
    bad, good = prompts_from_texts(["a\udcff", "b"])
    assert isinstance(bad, BadLine)
    assert bad.message == "the prompt is not UTF-8."
    assert isinstance(good, PromptRequest)


def test_text_files_have_one_chat_message_a_line() -> None:
    first, second = parse("tell me", "  {not json}", kind="text")
    assert isinstance(first, PromptRequest)
    assert isinstance(second, PromptRequest)
    assert (first.form, first.prompt) == ("text", [{"role": "user", "content": "tell me"}])
    assert second.prompt == [{"role": "user", "content": "  {not json}"}]


def test_bytes_that_are_not_utf8_are_placed() -> None:
    good, bad = parse_prompts(b"ok\nab\xffc", "text", DEFAULTS)
    assert isinstance(good, PromptRequest)
    assert isinstance(bad, BadLine)
    assert (bad.message, bad.id) == ("not UTF-8: byte 0xff at column 3.", "line-2")


def test_utf16_is_refused_as_a_whole() -> None:
    with pytest.raises(UserError, match="UTF-16"):
        parse_prompts("hello".encode("utf-16"), "text", DEFAULTS)


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("a.jsonl", b"x", "jsonl"),
        ("a.txt", b"{", "text"),
        ("standard input", b'\n {"prompt": 1}', "jsonl"),
        ("standard input", b"hello", "text"),
        ("noext", b"{", "jsonl"),
    ],
)
def test_the_kind_comes_from_the_name_or_the_first_character(name: str, data: bytes, kind: str) -> None:
    assert sniff(name, data) == kind


def test_prompts_from_the_command_line() -> None:
    first, second = prompts_from_texts(["hi", "  "])
    assert isinstance(first, PromptRequest)
    assert first.prompt == HI
    assert isinstance(second, BadLine)
    assert second.code == "empty_prompt"


def test_template_options_are_kept_apart_from_sampling() -> None:
    request = one({"messages": HI, "chat_template_kwargs": {"enable_thinking": False}, "temperature": 1})
    assert request.template_options == {"enable_thinking": False}
    assert request.sampling == {"temperature": 1}
