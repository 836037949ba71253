"""Finds prompts that are longer than the model's context before the model is loaded, with its tokenizer alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from nanoinfer.cli.batch_input import Batch
from nanoinfer.cli.prompt_fields import Prompt
from nanoinfer.cli.prompts_file import BadLine, Entry, PromptRequest
from nanoinfer.config import EngineConfig
from nanoinfer.errors import RequestError

# No model has a shorter context than this, and no token is shorter than a byte: what is below needs no tokenizer.
SHORT_BYTES = 1024
# What a chat template writes around each message, generously.
TEMPLATE_BYTES = 256


@dataclass(frozen=True)
class PromptLimits:
    """The context in tokens, how a text or messages are counted (None for a model without a tokenizer), and whether
    --max-model-len makes the context shorter than the model's own."""

    max_model_len: int
    count: Callable[[Prompt, dict[str, Any]], int] | None
    lowered: bool = False


def find_limits(config: EngineConfig) -> PromptLimits | None:
    """Read a model's context from its folder, fetching it if need be, and its tokenizer when the first prompt is
    counted. No torch. None for a model that is only a shape. ModelError as when the model is loaded."""
    if config.load_format == "dummy":
        return None
    from nanoinfer.engine.tokenizer import Tokenizer, has_tokenizer
    from nanoinfer.loading.folder import read_model_config
    from nanoinfer.loading.resolve import resolve_model

    source = resolve_model(config.model, revision=config.revision)
    own = read_model_config(source.folder).max_position_embeddings
    limit = min(own, config.max_model_len or own)
    if not has_tokenizer(source.folder):
        return PromptLimits(limit, None, limit < own)

    @cache
    def tokenizer() -> Tokenizer:
        return Tokenizer.from_folder(source.folder)

    def count(prompt: Prompt, options: dict[str, Any]) -> int:
        if isinstance(prompt, str):
            return len(tokenizer().encode(prompt))
        return len(tokenizer().encode_chat(prompt, **options)[1])

    return PromptLimits(limit, count, limit < own)


def check_lengths(
    batch: Batch, config: EngineConfig, options: dict[str, Any], find: Callable[[EngineConfig], PromptLimits | None]
) -> Batch:
    """The batch with every prompt that cannot fit made a BadLine. `options` are the chat template's variables.

    Nothing is looked up as long as no prompt could be too long for any model.
    """
    most_bytes = min(SHORT_BYTES, config.max_model_len or SHORT_BYTES)
    if all(_most_tokens(request) < most_bytes for request in batch.requests):
        return batch
    limits = find(config)
    if limits is None:
        return batch
    return replace(batch, entries=[_checked(entry, limits, options) for entry in batch.entries])


def _most_tokens(request: PromptRequest) -> int:
    """An upper bound of a prompt's tokens that costs nothing: the ids, or the bytes of all that a template can show."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return len(prompt.encode()) + 1
    messages = [item for item in prompt if isinstance(item, dict)]
    texts = [str(value) for message in messages for value in message.values()]
    ids = len(prompt) - len(messages)
    return ids + sum(len(text.encode()) for text in texts) + TEMPLATE_BYTES * len(messages)


def _checked(entry: Entry, limits: PromptLimits, options: dict[str, Any]) -> Entry:
    if isinstance(entry, BadLine) or _most_tokens(entry) < limits.max_model_len:
        return entry
    length = _length(entry, limits, options)
    if length is None or length < limits.max_model_len:
        return entry
    taker, advice = ("--max-model-len allows", " or raise that") if limits.lowered else ("this model takes", "")
    message = (
        f"the prompt has {length} tokens, but {taker} {limits.max_model_len} with at least one for the answer; "
        f"shorten it{advice}."
    )
    return entry.refused(message, "prompt_too_long")


def _length(request: PromptRequest, limits: PromptLimits, options: dict[str, Any]) -> int | None:
    """The prompt's tokens; None where only the engine can tell, which then says what is wrong."""
    if request.kind == "ids":
        return len(request.prompt)
    if limits.count is None:
        return None
    try:
        return limits.count(request.prompt, options | request.template_options)
    except RequestError:
        return None
