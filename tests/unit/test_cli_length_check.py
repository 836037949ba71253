"""Prompts longer than the context, found with the tokenizer alone, and only when one could be too long."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.cli.batch_input import Batch
from nanoinfer.cli.length_check import PromptLimits, check_lengths, find_limits
from nanoinfer.cli.prompts_file import BadLine, PromptRequest
from nanoinfer.config import EngineConfig
from nanoinfer.errors import ModelError, RequestError
from nanoinfer.loading.resolve import _shape


def batch(*prompts: Any) -> Batch:
    return Batch("test", [PromptRequest(i, i + 1, f"id-{i}", prompt) for i, prompt in enumerate(prompts)])


def never(config: EngineConfig) -> PromptLimits | None:
    raise AssertionError("nothing here can be too long for any model")


def test_nothing_is_looked_up_for_short_prompts() -> None:
    checked = batch("x" * 900, [1] * 900, [{"role": "user", "content": "y" * 600}])
    assert check_lengths(checked, EngineConfig(), {}, never) is checked


def test_a_low_max_model_len_makes_short_prompts_suspicious() -> None:
    with pytest.raises(AssertionError, match="nothing here"):
        check_lengths(batch("x" * 60), EngineConfig(max_model_len=50), {}, never)


def test_all_that_a_message_holds_makes_it_suspicious() -> None:
    call = {"function": {"name": "f", "arguments": "z" * 900}}
    for field, value in (("reasoning_content", "y" * 900), ("tool_calls", [call])):
        message = {"role": "assistant", "content": "", field: value}
        with pytest.raises(AssertionError, match="nothing here"):
            check_lengths(batch([{"role": "user", "content": "x"}, message]), EngineConfig(), {}, never)


def test_the_tokenizer_is_read_when_a_prompt_is_counted(tmp_path: Path) -> None:
    """Prompts of a few kilobytes, which fit any model of today, cost the time of reading the tokenizer."""
    shutil.copy(_shape(device_is_gpu=False).folder / "config.json", tmp_path)
    (tmp_path / "model.safetensors").touch()
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    limits = find_limits(EngineConfig(model=str(tmp_path), max_model_len=3000))
    assert limits is not None
    assert (limits.max_model_len, limits.lowered) == (3000, True)
    assert limits.count is not None
    with pytest.raises(ModelError, match=r"tokenizer\.json is broken"):
        limits.count("x", {})


def test_only_what_does_not_fit_becomes_a_bad_line() -> None:
    counted: list[tuple[Any, dict[str, Any]]] = []

    def count(prompt: Any, options: dict[str, Any]) -> int:
        counted.append((prompt, options))
        return 2000 if "long" in str(prompt) else 10

    long_chat = [{"role": "user", "content": "long" * 600}]
    given = batch("x", "long" * 600, "zzzz" * 600, long_chat, [1] * 1999, [1] * 2000)
    checked = check_lengths(given, EngineConfig(), {"enable_thinking": True}, lambda _: PromptLimits(2000, count))
    bad = [entry for entry in checked.entries if isinstance(entry, BadLine)]
    assert [(line.line, line.id, line.code) for line in bad] == [
        (2, "id-1", "prompt_too_long"),
        (4, "id-3", "prompt_too_long"),
        (6, "id-5", "prompt_too_long"),
    ]
    assert len(counted) == 3, "what is short in bytes is not tokenized"
    assert counted[-1] == (long_chat, {"enable_thinking": True})


@pytest.mark.parametrize(
    ("lowered", "message"),
    [
        (False, "the prompt has 5 tokens, but this model takes 1 with at least one for the answer; shorten it."),
        (True, "but --max-model-len allows 1 with at least one for the answer; shorten it or raise that."),
    ],
)
def test_what_the_limit_is_of_is_said(lowered: bool, message: str) -> None:
    limits = PromptLimits(1, None, lowered)
    [bad] = check_lengths(batch([1] * 5), EngineConfig(max_model_len=1), {}, lambda _: limits).entries
    assert isinstance(bad, BadLine)
    assert message in bad.message


def test_what_the_tokenizer_refuses_is_left_to_the_engine() -> None:
    def count(prompt: Any, options: dict[str, Any]) -> int:
        raise RequestError("the template refuses this")

    given = batch("x" * 3000)
    limits = (PromptLimits(2000, count), PromptLimits(2000, None))
    for limit in limits:
        assert check_lengths(given, EngineConfig(), {}, lambda _, limit=limit: limit).entries == given.entries
    assert check_lengths(given, EngineConfig(), {}, lambda _: None) is given
