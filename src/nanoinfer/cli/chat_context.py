"""When a conversation has grown as long as the model's context: what to forget is the person's choice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanoinfer.cli.chat_engine import ChatPrompt
from nanoinfer.config import SamplingParams
from nanoinfer.ui import text

if TYPE_CHECKING:
    from nanoinfer.cli.chat_loop import Chat

# Without max_tokens an answer should have this much room, or this part of the context where that is less.
_ROOM_TOKENS, _ROOM_SHARE = 256, 1 / 8


def fit(chat: Chat) -> tuple[ChatPrompt, SamplingParams] | None:
    """The prompt and the sampling of the next answer; None if the person would rather take the message back.

    Where nobody can choose, or nothing could be forgotten to any effect, the prompt goes as it is: the engine answers
    in the room there is, or refuses.
    """
    sampling = chat.settings.sampling
    prompt = chat.engine.encode(chat.conversation, chat.settings.think)
    wanted = sampling.max_tokens or min(_ROOM_TOKENS, int(chat.engine.context * _ROOM_SHARE))
    room = chat.engine.context - len(prompt.token_ids)
    if room >= wanted or not chat.reader.interactive:
        return prompt, sampling
    to_forget = _turns_to_forget(chat, wanted)
    if room < 1 and to_forget is None:
        return prompt, sampling
    return _let_choose(chat, prompt, room, wanted, to_forget)


def _turns_to_forget(chat: Chat, wanted: int) -> int | None:
    """The least number of oldest turns without which an answer of `wanted` tokens fits; None if none helps."""
    for number in range(1, len(chat.conversation.turns)):
        prompt = chat.engine.encode(chat.conversation.without_oldest(number), chat.settings.think)
        if len(prompt.token_ids) + wanted <= chat.engine.context:
            return number
    return None


def _let_choose(
    chat: Chat, prompt: ChatPrompt, room: int, wanted: int, to_forget: int | None
) -> tuple[ChatPrompt, SamplingParams] | None:
    used, context = text.count(len(prompt.token_ids)), text.plural(chat.engine.context, "token")
    some = f"{room} of {wanted} {'is' if room == 1 else 'are'}" if room > 0 else "nothing is"
    chat.console.warn(f"the context is full: the conversation has {used} of {context}, {some} left for the answer.")
    choices = {}
    if to_forget is not None:
        choices["o"] = f"forget the {text.plural(to_forget, 'oldest turn')} of {len(chat.conversation.turns)}"
        choices["c"] = "clear all earlier turns"
    if room >= 1:
        choices["s"] = f"shorter answer, of at most {text.plural(room, 'token')}"
    choices["b"] = "take this message back"
    for key, what in choices.items():
        chat.console.say(f"  {key}  {what}")
    choice = _choose(chat, choices)
    if choice == "b":
        chat.conversation.take_back()
        return None
    if choice == "s":
        return prompt, replace(chat.settings.sampling, max_tokens=room, min_tokens=0)
    number = len(chat.conversation.turns) - 1 if choice == "c" else to_forget
    assert number is not None, (choice, choices)
    chat.conversation.turns = chat.conversation.turns[number:]
    chat.console.dim(f"[{text.plural(number, 'turn')} forgotten; the rest is read anew]")
    return chat.engine.encode(chat.conversation, chat.settings.think), chat.settings.sampling


def _choose(chat: Chat, choices: dict[str, str]) -> str:
    keys = "/".join(choices)
    while True:
        try:
            choice = chat.reader.read(f"{keys}> ").strip().lower()[:1]
        except (EOFError, KeyboardInterrupt):
            return "b"
        if choice in choices:
            return choice
