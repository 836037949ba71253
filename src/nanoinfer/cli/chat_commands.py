"""The /commands of the chat."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from nanoinfer.cli.options import ThinkChoice
from nanoinfer.config import SamplingParams
from nanoinfer.errors import ConfigError
from nanoinfer.ui import text

if TYPE_CHECKING:
    from nanoinfer.cli.chat_loop import Chat

# What makes no sense for one streamed answer at a time.
_NOT_SETTABLE = ("n", "logprobs", "stop_token_ids", "ignore_eos")


@dataclass(frozen=True)
class ChatCommand:
    """`run` gets the chat and the text after the name; it returns True to leave."""

    names: tuple[str, ...]
    usage: str
    help: str
    run: Callable[[Chat, str], bool | None]


def run_command(chat: Chat, line: str) -> bool:
    """Run a line that starts with "/"; whether the chat ends. An unknown command is one error line, nothing else."""
    name, _, argument = line.partition(" ")
    name = name.lower()
    for command in COMMANDS:
        if name in command.names:
            return bool(command.run(chat, argument.strip()))
    near = difflib.get_close_matches(name, command_names(), n=1)
    chat.console.error(f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists them."))
    return False


def command_names() -> list[str]:
    return [name for command in COMMANDS for name in command.names]


def _help(chat: Chat, argument: str) -> None:
    for command in COMMANDS:
        chat.console.say(f"  {command.usage:24} {command.help}")
    chat.console.say('  """ ... """              A message of several lines; Alt-Enter starts a new line, too.')
    chat.console.say("  Ctrl-C                   Stop the answer; at the prompt, clear the line. Ctrl-D leaves.")


def _exit(chat: Chat, argument: str) -> bool:
    return True


def _clear(chat: Chat, argument: str) -> None:
    chat.conversation.clear()
    chat.console.say("The conversation is empty" + ("; the system prompt stays." if chat.conversation.system else "."))


def _system(chat: Chat, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument in ('""', "''", "none") else argument
    if chat.conversation.system:
        chat.console.say(f"system prompt: {chat.conversation.system}")
    else:
        chat.console.say("There is no system prompt; /system TEXT sets one.")


def settable_names() -> list[str]:
    """The names that /set knows."""
    return [f.name for f in fields(SamplingParams) if f.name not in _NOT_SETTABLE] + ["think", "stats"]


def _set(chat: Chat, argument: str) -> None:
    name, _, value = argument.partition(" ")
    settings, value = chat.settings, value.strip()
    if not name or not value:
        chat.console.say(f"/set NAME VALUE, where NAME is one of {', '.join(settable_names())}.")
    elif name == "stats" and value in ("on", "off"):
        settings.stats = value == "on"
    elif name == "think" and value in get_args(ThinkChoice):
        settings.think = value  # type: ignore[assignment]
    elif name in ("stats", "think"):
        chat.console.error(f"{name} is {'on or off' if name == 'stats' else 'auto, on or off'}.")
    elif name not in settable_names():
        near = difflib.get_close_matches(name, settable_names(), n=1)
        chat.console.error(f"there is no setting '{name}'" + (f"; did you mean '{near[0]}'?" if near else "."))
    else:
        try:
            settings.sampling = settings.sampling.with_options({name: _parse_value(name, value)})
        except ConfigError as error:
            chat.console.error(str(error))


def _parse_value(name: str, value: str) -> object:
    """A number where it is one, None for `none`, a list for stop strings, otherwise the text itself."""
    if name == "stop":
        return () if value == "none" else (value,)
    if value == "none":
        return None
    try:
        return json.loads(value)
    except ValueError:
        return value


def _show(chat: Chat, argument: str) -> None:
    info, sampling = chat.engine.llm.info, chat.settings.sampling
    chat.console.say(f"model: {info.model} on {info.device}, {info.dtype}, {text.count(info.max_model_len)} tokens")
    chat.console.say(f"system: {chat.conversation.system or '(none)'}")
    chat.console.say(f"think: {chat.settings.think}; stats: {'on' if chat.settings.stats else 'off'}")
    defaults = SamplingParams()
    shown = [f.name for f in fields(SamplingParams) if f.name not in _NOT_SETTABLE]
    changed = [n for n in shown if getattr(sampling, n) != getattr(defaults, n) or n in ("temperature", "max_tokens")]
    chat.console.say("sampling: " + ", ".join(f"{name} {getattr(sampling, name)}" for name in changed))


def _stats(chat: Chat, argument: str) -> None:
    totals = chat.engine.totals
    chat.console.say(f"last: {totals.last}")
    if totals.turns:
        share = 100 * totals.cached_tokens / totals.prompt_tokens
        chat.console.say(
            f"chat: {text.plural(totals.turns, 'answer')}, {text.count(totals.output_tokens)} output tokens, prompts "
            f"{text.count(totals.prompt_tokens)} ({text.count(totals.cached_tokens)} cached, {share:.0f}%)"
        )


def _cache(chat: Chat, argument: str) -> None:
    snapshot = chat.engine.llm.cache_snapshot()
    states = [block.state for block in snapshot.blocks]
    chat.console.say(
        f"{text.count(snapshot.num_blocks)} KV blocks of {snapshot.block_size} tokens: "
        f"{states.count('active')} active, {states.count('cached')} cached, {states.count('free')} free; "
        f"{snapshot.evictions} evicted so far"
    )


def _undo(chat: Chat, argument: str) -> None:
    taken = chat.conversation.take_back()
    chat.console.say(f"taken back: {text.one_line(taken)}" if taken else "There is nothing to take back.")


def _regen(chat: Chat, argument: str) -> None:
    taken = chat.conversation.take_back()
    if taken is None:
        chat.console.say("There is no answer to generate again.")
    else:
        chat.try_ask(taken)


COMMANDS = (
    ChatCommand(("/help", "/?"), "/help", "This list.", _help),
    ChatCommand(("/exit", "/quit", "/bye"), "/exit, /quit, /bye", "Leave.", _exit),
    ChatCommand(("/clear",), "/clear", "Forget the conversation.", _clear),
    ChatCommand(("/system",), "/system [TEXT]", 'Show or set the system prompt ("" removes it).', _system),
    ChatCommand(("/set",), "/set NAME VALUE", "Set a sampling parameter, think or stats.", _set),
    ChatCommand(("/show",), "/show", "Show the model and the settings.", _show),
    ChatCommand(("/stats",), "/stats", "Numbers of the last answer and of this chat.", _stats),
    ChatCommand(("/cache",), "/cache", "The KV blocks: active, cached, free.", _cache),
    ChatCommand(("/undo",), "/undo", "Take back the last question and its answer.", _undo),
    ChatCommand(("/regen",), "/regen", "Answer the last question again.", _regen),
)
