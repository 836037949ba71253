"""The chat's settings: /set changes one of them, /show shows them all."""

from __future__ import annotations

import difflib
import json
from dataclasses import fields
from typing import TYPE_CHECKING, get_args

from nanoinfer.cli.options import ThinkChoice, ThinkingDisplay
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError
from nanoinfer.ui import text

if TYPE_CHECKING:
    from nanoinfer.cli.chat_loop import Chat

# What makes no sense for one streamed answer at a time.
_NOT_SETTABLE = ("n", "logprobs", "stop_token_ids", "ignore_eos")
SAMPLING_NAMES = tuple(f.name for f in fields(SamplingParams) if f.name not in _NOT_SETTABLE)
# The settings of the chat itself, with the words for their values.
CHOICES: dict[str, tuple[str, ...]] = {
    "think": get_args(ThinkChoice),
    "thinking": get_args(ThinkingDisplay),
    "markdown": ("on", "off"),
    "stats": ("on", "off"),
}
NAMES = (*SAMPLING_NAMES, *CHOICES)


def set_value(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    settings, value = chat.settings, value.strip()
    if not name:
        chat.console.say(f"/set NAME VALUE, where NAME is one of {', '.join(NAMES)}.")
        return
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        raise UserError(f"there is no setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "."))
    if not value:
        chat.console.say(
            f"{name} is {_shown(chat, name)}" + (f" ({', '.join(CHOICES[name])})." if name in CHOICES else ".")
        )
        return
    if name in SAMPLING_NAMES:
        settings.sampling = settings.sampling.with_options({name: _parse_value(name, value)})
    elif value not in CHOICES[name]:
        raise UserError(f"{name} is {', '.join(CHOICES[name][:-1])} or {CHOICES[name][-1]}.")
    else:
        setattr(settings, name, value == "on" if CHOICES[name] == ("on", "off") else value)
    chat.console.dim(f"{name} is {_shown(chat, name)}")


def _parse_value(name: str, value: str) -> object:
    """A number where it is one, None for `none`, a list for stop strings, otherwise the text itself.

    A stop string may stand in quotes, "\\n" for example; as for /system, empty ones are none.
    """
    if name == "stop":
        if value.startswith('"') and isinstance(quoted := _from_json(value), str):
            value = quoted
        return () if value in ("none", "", "''") else (value,)
    return None if value == "none" else _from_json(value)


def _from_json(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _shown(chat: Chat, name: str) -> str:
    value = getattr(chat.settings.sampling if name in SAMPLING_NAMES else chat.settings, name)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None or value == ():
        return "none"
    return ", ".join(map(repr, value)) if isinstance(value, tuple) else str(value)


def show(chat: Chat, argument: str) -> None:
    info, defaults = chat.engine.llm.info, SamplingParams()
    chat.console.say(f"model: {info.model} on {info.device}, {info.dtype}, {text.plural(info.max_model_len, 'token')}")
    chat.console.say(f"system: {chat.conversation.system or '(none)'}")
    chat.console.say(" · ".join(f"{name} {_shown(chat, name)}" for name in CHOICES))
    changed = [
        name
        for name in SAMPLING_NAMES
        if getattr(chat.settings.sampling, name) != getattr(defaults, name) or name in ("temperature", "max_tokens")
    ]
    chat.console.say("sampling: " + ", ".join(f"{name} {_shown(chat, name)}" for name in changed))
    turns = text.plural(len(chat.conversation.turns), "turn")
    saved = f", saved in {chat.saved_as}" if chat.saved_as else ""
    attached = f", {text.plural(len(chat.attached), 'file')} for the next message" if chat.attached else ""
    chat.console.say(f"conversation: {turns}{saved}{attached}")
