"""The parts of the chat that need no engine: thinking, conversation, multi-line input."""

from __future__ import annotations

import io

import pytest

from nanoinfer.cli.conversation import Conversation
from nanoinfer.cli.line_reader import PipedReader, read_message
from nanoinfer.cli.thinking import ThinkSplitter


def split(output: str, size: int, *, inside: bool = False) -> tuple[str, str]:
    """(thinking, answer) when the output arrives in pieces of `size` characters."""
    splitter = ThinkSplitter(inside=inside)
    parts = [part for i in range(0, len(output), size) for part in splitter.push(output[i : i + size])]
    parts += splitter.finish()
    assert "".join(text for part, text in parts if part == "thinking") == splitter.thinking
    assert "".join(text for part, text in parts if part == "answer") == splitter.answer
    return splitter.thinking, splitter.answer


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("output", "thinking", "answer"),
    [
        ("<think>\nhm\n</think>\n\nyes", "hm\n", "yes"),
        ("\n<think>a < b</think>c", "a < b", "c"),
        ("no thoughts <think> here", "", "no thoughts <think> here"),
        ("<thin ice>", "", "<thin ice>"),
        ("<think></think>ok", "", "ok"),
        ("<think>cut </thi", "cut </thi", ""),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<thi", "", "<thi"),
        ("", "", ""),
    ],
)
def test_thinking_is_split_off_however_the_text_is_cut(output: str, size: int, thinking: str, answer: str) -> None:
    assert split(output, size) == (thinking, answer)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_output_of_a_prompt_that_opened_the_thinking_block(size: int) -> None:
    assert split("hm</think>\nyes", size, inside=True) == ("hm", "yes")


def test_conversation_messages_with_and_without_a_system_role() -> None:
    conversation = Conversation("be brief")
    conversation.ask("hi")
    assert conversation.messages() == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]
    assert conversation.messages(system_role=False) == [{"role": "user", "content": "be brief\n\nhi"}]
    assert conversation.turns == [{"role": "user", "content": "hi"}]


def test_an_answer_without_text_takes_the_question_back() -> None:
    conversation = Conversation()
    conversation.ask("hi")
    conversation.answered("")
    assert conversation.turns == []


def test_undo_and_dropping_the_oldest() -> None:
    conversation = Conversation()
    for question in ("a", "b", "c"):
        conversation.ask(question)
        conversation.answered(question.upper())
    assert conversation.take_back() == "c"
    assert conversation.drop_oldest()
    assert [turn["content"] for turn in conversation.turns] == ["b", "B"]
    assert not conversation.drop_oldest()
    conversation.clear()
    assert conversation.take_back() is None


def test_multi_line_messages_and_line_ends() -> None:
    reader = PipedReader(io.StringIO('one\r\n"""two\n\nthree"""\n"""four"""\n"""\nfive\n"""\nsix'))
    messages = [read_message(reader) for _ in range(5)]
    assert messages == ["one", "two\n\nthree", "four", "five", "six"]
    with pytest.raises(EOFError):
        read_message(reader)
