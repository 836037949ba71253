"""Prompts files: JSONL (flat or OpenAI batch) and text, checked line by line before any model is loaded.

Every line becomes a PromptRequest or a BadLine that says what is wrong with it; nothing is silently ignored.
Lines end at "\\n" only: U+2028 and U+0085 are legal inside JSON strings, so `str.splitlines` would tear lines apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from nanoinfer.cli.prompt_fields import (
    CHAT_URL,
    BadFieldError,
    Form,
    Prompt,
    parse_batch_line,
    parse_flat_line,
)
from nanoinfer.config import SamplingParams
from nanoinfer.engine.chat_template import json_kind
from nanoinfer.errors import ConfigError, UserError

FileKind = Literal["jsonl", "text"]

# Levels of lists and objects in a line. Python's own limit depends on where it is reached: what can be read here might
# be too deep to be written as a record.
MAX_NESTING = 100


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A line that can run. `sampling` holds only what the line itself sets; `index` counts lines that are not blank."""

    index: int
    line: int
    id: str | int
    prompt: Prompt
    form: Form = "flat"
    id_key: str = "custom_id"
    sampling: dict[str, Any] = field(default_factory=dict)
    template_options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None  # the model that an OpenAI body asks for
    metadata: Any = None

    @property
    def kind(self) -> Literal["text", "ids", "messages"]:
        """What the prompt is."""
        if isinstance(self.prompt, str):
            return "text"
        return "ids" if isinstance(self.prompt[0], int) else "messages"

    def refused(self, message: str, code: str) -> BadLine:
        """The same line as one that cannot run after all."""
        return BadLine(self.index, self.line, message, code, self.id, self.form, self.id_key)


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that cannot run, with as much of its identity as could be read."""

    index: int
    line: int
    message: str
    code: str = "invalid_request"
    id: str | int | None = None
    form: Form = "flat"
    id_key: str = "custom_id"


Entry = PromptRequest | BadLine


def sniff(name: str, data: bytes) -> FileKind:
    """The kind of a file from its name, or from its first character where the name does not say."""
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    if name.endswith((".txt", ".text", ".md")):
        return "text"
    return "jsonl" if data.lstrip()[:1] == b"{" else "text"


def parse_prompts(data: bytes, kind: FileKind, defaults: SamplingParams) -> list[Entry]:
    """All lines that are not blank, in order. `defaults` are what a line's own sampling options are checked with.

    Raises UserError if the file as a whole cannot be text in UTF-8, or is one JSON document instead of lines.
    """
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError("the prompts are in UTF-16; save them as UTF-8.")
    entries: list[Entry] = []
    first_line_of: dict[str, int] = {}
    for line, raw in _lines(data):
        entry = _parse_line(len(entries), line, raw, kind, defaults)
        if entry.id is not None:
            first = first_line_of.setdefault(str(entry.id), line)
            if first != line and isinstance(entry, PromptRequest):
                message = f"the id '{entry.id}' is already used on line {first}; give every line its own."
                entry = replace(entry.refused(message, "duplicate_id"), id=_free_id(line, first_line_of))
        entries.append(entry)
    if kind == "jsonl" and entries and isinstance(entries[0], BadLine):
        _refuse_document(data, len(entries))
    return entries


def _free_id(line: int, first_line_of: dict[str, int]) -> str:
    """An id for the record of a line whose own one names another record; from now on it is taken."""
    name = f"line-{line}"
    while name in first_line_of:
        name += "-again"
    first_line_of[name] = line
    return name


def _refuse_document(data: bytes, lines: int) -> None:
    """UserError if `data` is a JSON list of objects, or one object over several lines."""
    try:
        document = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return
    is_list = isinstance(document, list) and any(isinstance(item, dict) for item in document)
    if is_list or (isinstance(document, dict) and lines > 1):
        what, program = ("a JSON list", "jq -c '.[]'") if is_list else ("one JSON object over several lines", "jq -c .")
        raise UserError(f"the prompts are {what}; put each prompt's object on a line of its own ({program} does that).")


def prompts_from_texts(texts: list[str]) -> list[Entry]:
    """Requests for prompts that were given on the command line (-p)."""
    entries: list[Entry] = []
    for index, text in enumerate(texts):
        if any("\ud800" <= char <= "\udfff" for char in text):  # how Python takes in bytes that are no UTF-8
            entries.append(BadLine(index, index + 1, "the prompt is not UTF-8."))
        elif text.strip():
            messages = [{"role": "user", "content": text}]
            entries.append(PromptRequest(index, index + 1, f"prompt-{index + 1}", messages, "text"))
        else:
            entries.append(BadLine(index, index + 1, "the prompt is empty; write something.", "empty_prompt"))
    return entries


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes without the line end) of every line that is not blank. A byte order mark is taken away
    from any line: files that are joined have one in the middle."""
    for number, raw in enumerate(data.split(b"\n"), start=1):
        line = raw.removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r")
        if line.strip():
            yield number, line


def _parse_line(index: int, line: int, raw: bytes, kind: FileKind, defaults: SamplingParams) -> Entry:
    fields: dict[str, Any] = {}
    try:
        text = raw.decode("utf-8")
        if kind == "text":
            return PromptRequest(index, line, f"line-{line}", [{"role": "user", "content": text}], "text")
        fields = _json_object(text)
        parsed = parse_batch_line(fields) if _is_batch_line(fields) else parse_flat_line(fields)
        defaults.with_options(parsed["sampling"])
        parsed.setdefault("id", f"line-{line}")
        return PromptRequest(index, line, **parsed)
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}."
        return _bad(index, line, message, "invalid_request", fields)
    except BadFieldError as error:
        return _bad(index, line, str(error), error.code, fields)
    except ConfigError as error:
        return _bad(index, line, str(error), "invalid_request", fields)


def _is_batch_line(fields: dict[str, Any]) -> bool:
    """Whether it is meant to be in OpenAI's envelope, well-formed or not."""
    return bool(fields.keys() & {"body", "url", "method"})


def _bad(index: int, line: int, message: str, code: str, fields: dict[str, Any]) -> BadLine:
    """A BadLine that keeps the id and the form of its line, where there is a usable one."""
    form: Form = "flat"
    if _is_batch_line(fields):
        form = "chat" if fields.get("url", CHAT_URL) == CHAT_URL else "completion"
    for key in ("custom_id", "id"):
        if isinstance(fields.get(key), str | int) and not isinstance(fields[key], bool):
            return BadLine(index, line, message, code, fields[key], form, key)
    return BadLine(index, line, message, code, f"line-{line}", form)


def _json_object(text: str) -> dict[str, Any]:
    """The line's JSON object; BadFieldError says what is wrong and in which column."""
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicate_keys, parse_constant=_no_constant)
        if text.count("[") + text.count("{") > MAX_NESTING:
            _refuse_deep(value)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadFieldError(f"not JSON: {error.msg.removesuffix(' at')} at column {error.colno}.") from None
    except UnicodeEncodeError:
        raise BadFieldError(
            "a string holds half of a surrogate pair (\\ud800 to \\udfff), which is no character."
        ) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, nesting without end
        raise BadFieldError(f"not JSON that can be read: {error}.") from None
    if not isinstance(value, dict):
        raise BadFieldError(f"the line must hold a JSON object, not {json_kind(value)}.")
    return value


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    if any(isinstance(item, dict | list) for item in level):
        raise BadFieldError(f"lists and objects are nested more than {MAX_NESTING} levels deep.")


def _no_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadFieldError(f"the field '{twice}' is given twice.")
    return result


def _no_constant(name: str) -> NoReturn:
    raise BadFieldError(f"{name} is not a JSON value.")
