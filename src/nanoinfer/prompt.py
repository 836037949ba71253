"""What a caller may give as a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias, TypeGuard, cast

from nanoinfer.errors import RequestError

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def checked(prompt: Prompt) -> Prompt:
    """The prompt, an array of token ids as a list; RequestError for what can be none."""
    if isinstance(prompt, Mapping):
        raise RequestError("a prompt is text, token ids or messages, not one mapping; put a message into a list.")
    if isinstance(prompt, set | frozenset):
        raise RequestError("a prompt is text, token ids or messages, not a set, which has no order; make a list of it.")
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
        raise RequestError(f"a prompt is text, token ids or messages, not {type(prompt).__name__}.")
    return cast("Prompt", prompt.tolist()) if hasattr(prompt, "tolist") else prompt  # of numpy or torch


def is_token_ids(prompt: Sequence[Any]) -> TypeGuard[Sequence[int]]:
    # Asked once per kind of item, not per item: this is on the path to the first token of prompts of any length.
    return all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in set(map(type, prompt)))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a list of numbers or of messages is one prompt, any other list is many."""
    if isinstance(prompts, str | bytes | bytearray | Mapping | set | frozenset) or not isinstance(prompts, Iterable):
        return [prompts]  # which says itself what is wrong with it
    items = prompts.tolist() if hasattr(prompts, "tolist") else list(prompts)
    if items and (is_token_ids(items) or all(isinstance(item, Mapping) for item in items)):
        return [cast("Prompt", items)]
    return cast("list[Prompt]", items)
