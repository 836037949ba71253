"""The parts of the chat that need no engine: thinking, conversation, multi-line input."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from nanoinfer.cli.chat_history import TokenHistory
from nanoinfer.cli.chat_transcript import read_transcript, write_transcript
from nanoinfer.cli.conversation import Conversation, Turn
from nanoinfer.cli.line_reader import PipedReader, read_message
from nanoinfer.cli.thinking import ThinkSplitter
from nanoinfer.config import SamplingParams
from nanoinfer.errors import UserError


def messages_json(*messages: dict[str, str]) -> str:
    return json.dumps({"format": "nanoinfer-chat", "version": 1, "messages": messages})


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
    assert conversation.turns == [Turn("hi")]


def test_a_question_without_an_answer_joins_the_next() -> None:
    conversation = Conversation()
    for question, answer in (("a", ""), ("b", "B"), ("c", "")):
        conversation.ask(question)
        conversation.answered(answer, "hm", "abort")
    assert [(m["role"], m["content"]) for m in conversation.messages()] == [
        ("user", "a\n\nb"), ("assistant", "B"), ("user", "c"),
    ]  # fmt: skip


def test_undo_and_forgetting_the_oldest() -> None:
    conversation = Conversation("s")
    for question in ("a", "b", "c"):
        conversation.ask(question)
        conversation.answered(question.upper(), "", "stop")
    assert conversation.take_back() == "c"
    assert conversation.without_oldest(1) == Conversation("s", [Turn("b", "B", "", "stop")])
    conversation.clear()
    assert conversation.take_back() is None


def test_multi_line_messages_and_line_ends() -> None:
    reader = PipedReader(io.BytesIO(b'one\r\n"""two\n\nthree"""\n"""four"""\n"""\nfive\n"""\n"""/no"""\n /six'))
    messages = [read_message(reader) for _ in range(6)]
    assert [message.text for message in messages] == ["one", "two\n\nthree", "four", "five", "/no", " /six"]
    assert [message.is_command for message in messages] == [False] * 5 + [True]
    with pytest.raises(EOFError):
        read_message(reader)


def test_the_end_of_the_input_closes_a_message() -> None:
    reader = PipedReader(io.BytesIO(b'"""\nfirst\n/second\n'))
    message = read_message(reader)
    assert (message.text, message.is_command) == ("first\n/second", False)
    with pytest.raises(EOFError):
        read_message(reader)


def test_a_transcript_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    conversation = Conversation("s", [Turn("q \ud800 \u00e9", "a", "hm", "stop"), Turn("unanswered")])
    write_transcript(path, conversation, "m", SamplingParams())
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    write_transcript(path, conversation, "m", SamplingParams())
    assert read_transcript(path) == (conversation, "m")
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]  # nothing temporary is left
    assert json.loads(path.read_text())["messages"][1] == {"role": "user", "content": "q \ud800 \u00e9"}
    with pytest.raises(UserError, match=r"cannot write .*no-such/x: No such file"):
        write_transcript(tmp_path / "no-such" / "x", conversation, "m", SamplingParams())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("\ud800", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "is no saved chat"),
        ('{"format": "other"}', "is no saved chat"),
        ('{"format": "nanoinfer-chat", "version": 2}', "has version 2 of the format"),
        ('{"format": "nanoinfer-chat", "version": 1}', 'has no list "messages"'),
        (messages_json({"role": "user"}), r"messages\[0\] is no"),
        (messages_json({"role": "assistant", "content": "a"}), r"messages\[0\] has the role 'assistant'"),
        (messages_json({"role": "tool", "content": "a"}), r"messages\[0\] has the role 'tool'"),
    ],
)
def test_what_is_wrong_with_a_transcript_is_said(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=message):
        read_transcript(path)
    with pytest.raises(UserError, match="cannot read"):
        read_transcript(tmp_path)


# Ids below 100 are characters, of which 10 + n is "ab"[n] and 20 is "ab" in one; those from 100 on are special.
TEXTS = {10: "a", 11: "b", 20: "ab", 30: "?"}


def token_history() -> TokenHistory:
    return TokenHistory(lambda ids: "".join(TEXTS.get(i, "") for i in ids), lambda token: token >= 100)


def test_an_answer_is_given_back_with_the_ids_that_were_generated() -> None:
    history = token_history()
    first = [100, 30, 101]
    assert history.prompt(first) == first
    history.answered(first, [10, 11, 102])  # "ab" in two ids, then EOS
    second = [*first, 20, 102, 100, 30, 101]  # the tokenizer writes it in one
    assert history.prompt(second) == [*first, 10, 11, 102, 100, 30, 101]
    history.answered(second, [20])
    third = [*second, 20, 102, 100, 30, 30, 101]
    assert history.prompt(third) == [*first, 10, 11, 102, 100, 30, 101, 20, 102, 100, 30, 30, 101]
    assert history.prompt(second) == [*first, 10, 11, 102, 100, 30, 101]  # asked again
    assert history.prompt([*first, 11, 102]) == [*first, 11, 102]  # another answer: as it is encoded
    assert history.prompt([100, 10, 101]) == [100, 10, 101]  # another conversation


def test_ids_that_have_no_text_in_the_answer_are_left_out() -> None:
    history = token_history()
    history.answered([100], [10, 11, 30])  # "?" was a stop string
    assert history.prompt([100, 20, 102]) == [100, 10, 11, 102]
    history.answered([100], [30, 10, 11])  # "?" was thinking: the KV behind it is another
    assert history.prompt([100, 20, 102]) == [100, 20, 102]
