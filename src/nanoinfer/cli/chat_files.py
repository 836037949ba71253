"""The chat's commands that touch files: /save, /load and /read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.cli.chat_transcript import read_transcript, refuse_endless, write_transcript
from nanoinfer.errors import UserError
from nanoinfer.ui import text

if TYPE_CHECKING:
    from nanoinfer.cli.chat_loop import Chat

# No tokenizer packs more bytes into a token on average; a file above this many a token of context need not be read.
_MOST_BYTES_PER_TOKEN = 32


def save(chat: Chat, argument: str) -> None:
    path = _path(argument) if argument else chat.saved_as
    if path is None:
        raise UserError("/save FILE: name the file to write.")
    if not chat.conversation.turns:
        raise UserError("there is nothing to save yet.")
    if path.exists() and path != chat.saved_as and not _may_overwrite(chat, path):
        return
    write_transcript(path, chat.conversation, chat.engine.llm.info.model, chat.settings.sampling)
    again = " again" if path == chat.saved_as else ""
    chat.saved_as = path
    chat.console.say(f"{text.plural(len(chat.conversation.turns), 'turn')} saved{again} in {path}")


def _may_overwrite(chat: Chat, path: Path) -> bool:
    if not path.is_file():
        raise UserError(f"{path} is no file; choose another name.")
    if not chat.reader.interactive:
        raise UserError(f"{path} exists; choose another name.")
    chat.console.say(f"{path} exists.")
    try:
        answer = chat.reader.read("Overwrite it? [y/N] ")
    except (EOFError, KeyboardInterrupt):
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    chat.console.say("Nothing was written.")
    return False


def load(chat: Chat, argument: str) -> None:
    if not argument:
        raise UserError("/load FILE: name a file that /save wrote.")
    path = _path(argument)
    conversation, model = read_transcript(path)
    former = len(chat.conversation.turns)
    chat.conversation, chat.saved_as, chat.attached = conversation, path, []
    gone = f"; the {text.plural(former, 'turn')} before it {'is' if former == 1 else 'are'} forgotten" if former else ""
    chat.console.say(f"{text.plural(len(conversation.turns), 'turn')} loaded from {path}{gone}")
    if model != chat.engine.llm.info.model:
        chat.console.say(f"They were held with {model}; this is {chat.engine.llm.info.model}.")
    if conversation.turns:
        last = conversation.turns[-1]
        chat.console.dim(f"last: {text.one_line(last.question)} -> {text.one_line(last.answer) or '(no answer)'}")


def read(chat: Chat, argument: str) -> None:
    """Put a file's text before the next message."""
    if not argument:
        raise UserError("/read FILE: name a text file; it opens your next message.")
    path = _path(argument)
    context = chat.engine.context
    refuse_endless(path)
    try:
        if path.stat().st_size > _MOST_BYTES_PER_TOKEN * context:
            size = text.byte_size(path.stat().st_size)
            raise UserError(f"{path} has {size}, too much for a context of {text.plural(context, 'token')}; cut it.")
        content = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}).") from error
    if "\0" in content:
        raise UserError(f"{path} is not text (it has a zero byte).")
    content = content.strip("\n")
    if not content.strip():
        raise UserError(f"{path} is empty.")
    tokens = chat.engine.count_tokens(content)
    if tokens >= context:
        raise UserError(
            f"{path} has {text.plural(tokens, 'token')}, and the context is {text.count(context)}; give a shorter file."
        )
    chat.attached.append(content)
    chat.console.say(
        f"{path}: {text.plural(tokens, 'token')} of a context of {text.count(context)}; "
        "your next message comes after it."
    )


def _path(argument: str) -> Path:
    """A file name as people type or paste it: quoted or not, with ~."""
    if len(argument) > 1 and argument[0] == argument[-1] and argument[0] in "\"'":
        argument = argument[1:-1]
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:  # ~nobody
        raise UserError(f"{argument}: {error}") from error
