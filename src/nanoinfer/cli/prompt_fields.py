"""The fields of one line of a prompts file: flat, or OpenAI's batch envelope. Unknown and unsupported ones are refused.

OpenAI's forms: https://platform.openai.com/docs/guides/batch, /docs/api-reference/chat and /completions.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from nanoinfer.config import SamplingParams
from nanoinfer.engine.chat_template import check_messages
from nanoinfer.errors import RequestError

Form = Literal["flat", "text", "chat", "completion"]  # chat and completion: in OpenAI's envelope
Prompt = str | list[int] | list[dict[str, Any]]  # raw text, token ids, or messages for the chat template

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
_SAMPLING = tuple(f.name for f in dataclass_fields(SamplingParams))
_MESSAGE_FIELDS = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")

# Fields that OpenAI or other servers know and nanoinfer does not, with the values that change nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logit_bias": ({},),
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "prompt_logprobs": (),
}


class BadFieldError(Exception):
    """What is wrong with a line, in one sentence. `code` is one of RequestError's or `unsupported_field` or
    `unknown_field`."""

    def __init__(self, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


def parse_flat_line(line: dict[str, Any]) -> dict[str, Any]:
    """Fields of a PromptRequest from {"prompt" or "messages", "id"?, sampling options...}."""
    body = dict(line)
    parsed: dict[str, Any] = {}
    given = [key for key in ("id", "custom_id") if key in body]
    if len(given) == 2:
        raise BadFieldError("'id' and 'custom_id' are both given; keep one of them.")
    for key in given:
        parsed |= {"id": _checked_id(key, body.pop(key)), "id_key": key}
    return parsed | _parse_body(body, "flat")


def parse_batch_line(line: dict[str, Any]) -> dict[str, Any]:
    """Fields of a PromptRequest from OpenAI's {"custom_id", "method", "url", "body"}."""
    for key in line:
        if key not in ("custom_id", "method", "url", "body"):
            raise BadFieldError(f"unknown field '{key}' beside 'body'; options belong inside it.")
    missing = [key for key in ("custom_id", "method", "url", "body") if key not in line]
    if missing:
        raise BadFieldError(f"'{missing[0]}' is missing; a batch line has custom_id, method, url and body.")
    if line["method"] != "POST":
        raise BadFieldError(f"method {line['method']!r} is not supported; it must be 'POST'.")
    if line["url"] not in (CHAT_URL, COMPLETION_URL):
        raise BadFieldError(f"url {line['url']!r} is not supported; {CHAT_URL} and {COMPLETION_URL} are.")
    if not isinstance(line["body"], dict):
        raise BadFieldError("'body' must be an object.")
    form: Form = "chat" if line["url"] == CHAT_URL else "completion"
    wrong = "prompt" if form == "chat" else "messages"
    if wrong in line["body"]:
        raise BadFieldError(f"'{wrong}' does not belong to {line['url']}.")
    identity = {"id": _checked_id("custom_id", line["custom_id"]), "id_key": "custom_id"}
    return identity | _parse_body(dict(line["body"]), form)


def _checked_id(key: str, value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise BadFieldError(f"'{key}' must be a string that is not empty, or a whole number.")
    return value


def _parse_body(body: dict[str, Any], form: Form) -> dict[str, Any]:
    body = {key: value for key, value in body.items() if value is not None}  # null means "not set" to OpenAI's clients
    parsed: dict[str, Any] = {"form": form, "prompt": _take_prompt(body)}
    parsed["template_options"] = _take_template_options(body)
    model, metadata = body.pop("model", None), _checked_metadata(body.pop("metadata", None))
    if model is not None and not isinstance(model, str):
        raise BadFieldError("'model' must be a string.")
    body.pop("user", None)  # OpenAI's abuse-tracking label: by definition without effect on the answer
    parsed |= {"model": model, "metadata": metadata}
    _normalise_logprobs(body, form)
    if "max_completion_tokens" in body:
        if "max_tokens" in body:
            raise BadFieldError("'max_tokens' and 'max_completion_tokens' are both given; keep one of them.")
        body["max_tokens"] = body.pop("max_completion_tokens")
    for name, value in list(body.items()):
        if name in _UNSUPPORTED:
            if value not in _UNSUPPORTED[name]:
                raise BadFieldError(f"'{name}' is not supported by nanoinfer; remove it.", "unsupported_field")
            del body[name]
        elif name not in _SAMPLING:
            raise BadFieldError(_unknown(name), "unknown_field")
    parsed["sampling"] = body
    return parsed


def _checked_metadata(metadata: Any) -> Any:
    """The caller's own notes, which go to the record unchanged; only what JSON cannot hold (1e999) is refused."""
    try:
        json.dumps(metadata, allow_nan=False)
    except ValueError:
        raise BadFieldError("'metadata' holds a number that is too large.") from None
    return metadata


def _unknown(name: str) -> str:
    known = ["id", "custom_id", "prompt", "messages", "metadata", "chat_template_kwargs", *_SAMPLING]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "put notes of your own under 'metadata'."
    return f"unknown field '{name}'; {hint}"


def _take_prompt(body: dict[str, Any]) -> Prompt:
    if "prompt" in body and "messages" in body:
        raise BadFieldError("both 'prompt' and 'messages' are given; keep one of them.")
    if "prompt" not in body and "messages" not in body:
        raise BadFieldError("neither 'prompt' (text or a list of token ids) nor 'messages' is given.")
    if "messages" in body:
        return _checked_messages(body.pop("messages"))
    prompt = body.pop("prompt")
    if prompt in ("", []):
        raise BadFieldError("the prompt is empty; write something.", "empty_prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise BadFieldError("'prompt' must be text or a list of token ids.")
    if any(isinstance(item, str | list) for item in prompt):
        raise BadFieldError("'prompt' holds several prompts; give each its own line.")
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in prompt):
        raise BadFieldError("'prompt' must be text or a list of token ids (whole numbers of at least 0).")
    return prompt


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with text content; what a message may hold beside that is what chat templates read."""
    if messages == []:
        raise BadFieldError("'messages' is empty; it needs at least one message.", "empty_prompt")
    try:
        checked = check_messages(messages)
    except RequestError as error:
        raise BadFieldError(str(error), error.code) from None
    for number, message in enumerate(checked):
        for key, value in message.items():
            if key not in _MESSAGE_FIELDS and value not in ([], {}):
                raise BadFieldError(f"messages[{number}]: '{key}' is not supported; remove it.", "unsupported_field")
    return checked


def _take_template_options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.pop("chat_template_kwargs", {})
    if not isinstance(options, dict):
        raise BadFieldError("'chat_template_kwargs' must be an object.")
    return options


def _normalise_logprobs(body: dict[str, Any], form: Form) -> None:
    """OpenAI's chat form says `logprobs: true, top_logprobs: k`; everywhere else `logprobs: k`."""
    if form != "chat":
        return
    wanted, top = body.pop("logprobs", False), body.pop("top_logprobs", None)
    if not isinstance(wanted, bool):
        raise BadFieldError("'logprobs' must be true or false here; 'top_logprobs' is the number.")
    if top is not None and not wanted:
        raise BadFieldError("'top_logprobs' needs 'logprobs': true.")
    if wanted:
        body["logprobs"] = 0 if top is None else top
