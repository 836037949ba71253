"""A chat as a JSON file: written whole or not at all, read with every mistake named.

    {"format": "nanoinfer-chat", "version": 1, "model": "...", "sampling": {...},
     "messages": [{"role": "system" | "user" | "assistant", "content": "...",
                   "thinking": "...", "finish_reason": "..."}]}

`thinking` and `finish_reason` are the assistant's and may be missing.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoinfer.cli.conversation import Conversation, Turn
from nanoinfer.cli.durable import put_in_place, sync
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError

FORMAT, VERSION = "nanoinfer-chat", 1


def write_transcript(path: Path, conversation: Conversation, model: str, sampling: SamplingParams) -> None:
    """Replace `path` by the conversation; only its owner can read a file that is new. UserError if that fails."""
    messages: list[dict[str, str]] = []
    if conversation.system:
        messages.append({"role": "system", "content": conversation.system})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": turn.question})
        if turn.finish_reason is not None:
            answer = {"role": "assistant", "content": turn.answer, "finish_reason": turn.finish_reason}
            messages.append(answer | ({"thinking": turn.thinking} if turn.thinking else {}))
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "sampling": asdict(sampling),
        "messages": messages,
    }
    try:
        _replace(path.resolve(), json.dumps(document, ensure_ascii=False, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file.") from error


def _replace(path: Path, content: str) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        # A lone surrogate can come out of JSON; in the file it is an escape again.
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(content)
            file.flush()
            sync(file.fileno())
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_endless(path: Path) -> None:
    """UserError for a device or a pipe, of which there may be no end, and nobody could stop that."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is a device or a pipe; name a file.")


def read_transcript(path: Path) -> tuple[Conversation, str]:
    """The conversation in a file, and the model that it was held with. UserError says what is wrong with the file."""
    refuse_endless(path)
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"{path} is not JSON (line {error.lineno}: {error.msg}); /load reads what /save wrote."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); /load reads what /save wrote.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f'{path} is no saved chat ("format" is not "{FORMAT}"); /load reads what /save wrote.')
    version = document.get("version")
    if version != VERSION:
        raise UserError(f"{path} has version {version!r} of the format, and this nanoinfer reads {VERSION}; update it.")
    messages = document.get("messages")
    if not isinstance(messages, list):
        raise UserError(f'{path} has no list "messages".')
    return _conversation(path, messages), str(document.get("model", "an unknown model"))


def _conversation(path: Path, messages: list[Any]) -> Conversation:
    conversation = Conversation()
    for number, message in enumerate(messages):
        where = f"{path}: messages[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise UserError(f'{where} is no {{"role": ..., "content": text}}.')
        role, content = message.get("role"), message["content"]
        if role == "system" and number == 0:
            conversation.system = content
        elif role == "user":
            conversation.turns.append(Turn(content))
        elif role == "assistant" and conversation.turns and conversation.turns[-1].finish_reason is None:
            conversation.answered(content, str(message.get("thinking", "")), str(message.get("finish_reason", "stop")))
        else:
            raise UserError(
                f"{where} has the role {role!r}; a chat is a system message, then user and assistant in turn."
            )
    return conversation
