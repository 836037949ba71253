"""`nanoinfer chat` with piped input and -p, on a stand-in engine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_llm import ByteTokenizer, FakeLLM, shout
from program import Program

HERE = Path(__file__).parent


def with_llm(nanoinfer: Program, **options: Any) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, **options)


def messages(nanoinfer: Program, turn: int) -> str:
    """The rendered prompt of a turn."""
    token_ids = nanoinfer.llm.submitted[turn][0]
    return bytes(token_ids).decode()


def test_piped_lines_are_turns_of_one_conversation(nanoinfer: Program) -> None:
    result = nanoinfer("chat", stdin="first\n\nsecond\n")
    assert (result.code, result.out) == (0, "FIRST\nSECOND\n")
    assert messages(nanoinfer, 1) == "<user>first<assistant>FIRST<user>second<assistant>"
    assert nanoinfer.llm.closed


def test_a_message_that_the_end_of_the_input_closes_is_answered(nanoinfer: Program) -> None:
    result = nanoinfer("chat", stdin='first\n"""second\nthird')
    assert (result.code, result.out) == (0, "FIRST\nSECOND\nTHIRD\n")
    assert nanoinfer("chat", stdin='first\n"""\n').out == "FIRST\n"


def test_piped_input_that_is_not_utf8_ends_the_chat(nanoinfer: Program) -> None:
    result = nanoinfer("chat", stdin="\u00e9\n".encode() + b"caf\xe9\nnever\n")
    assert (result.code, result.out) == (2, "\u00c9\n")
    assert "line 2 of standard input is not UTF-8: byte 0xe9 at column 4; convert it to UTF-8 first." in result.err


def test_a_piped_chat_has_no_prompts_and_no_escape_codes() -> None:
    command = [sys.executable, str(HERE / "fake_main.py"), "--", "chat", "--stats"]
    environment = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    done = subprocess.run(
        command, input="hello\n/help\nagain\n", env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "HELLO\nAGAIN\n")
    assert "\x1b" not in done.stderr
    assert ">>>" not in done.stderr
    assert "not a terminal" not in done.stderr
    assert "warning" not in done.stderr.lower()


def test_the_system_prompt_stands_once_however_many_turns_there_are(nanoinfer: Program) -> None:
    nanoinfer("chat", "--system", "be brief", stdin="one\ntwo\nthree\n")
    assert (
        messages(nanoinfer, 2) == "<system>be brief<user>one<assistant>ONE<user>two<assistant>TWO<user>three<assistant>"
    )


def test_a_turn_reuses_the_kv_of_the_turns_before_it(nanoinfer: Program) -> None:
    result = nanoinfer("chat", "--stats", stdin="a first question\nand a second\n")
    first, second = [line for line in result.err.splitlines() if "TTFT" in line]
    assert "prompt 33 (0 cached, 0%) · stop" in first
    assert "prompt 78 (48 cached, 62%) · stop" in second


def test_one_shot(nanoinfer: Program) -> None:
    result = nanoinfer("chat", "-p", "hello", "--system", "be brief")
    assert (result.code, result.out) == (0, "HELLO\n")
    assert messages(nanoinfer, 0) == "<system>be brief<user>hello<assistant>"


def test_one_shot_as_json(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "<think>hm</think>ok")
    document = json.loads(nanoinfer("chat", "-p", "hello", "--json").out)
    assert (document["text"], document["thinking"], document["finish_reason"]) == ("ok", "hm", "stop")
    assert document["usage"]["completion_tokens"] == 20


@pytest.mark.parametrize(("options", "shown"), [([], '"ÉTÉ"'), (["--ascii"], r'"\u00c9T\u00c9"')])
def test_json_loses_no_character_where_only_ascii_is_shown(nanoinfer: Program, options: list[str], shown: str) -> None:
    out = nanoinfer("chat", "-p", "été", "--json", *options).out
    assert shown in out
    assert json.loads(out)["text"] == "ÉTÉ"


def test_thinking_is_neither_on_standard_output_nor_fed_back(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "<think>\nhm\n</think>\n\n" + shout(prompt))
    assert nanoinfer("chat", stdin="one\ntwo\n").out == "ONE\nTWO\n"
    assert messages(nanoinfer, 1) == "<user>one<assistant>ONE<user>two<assistant>"


@pytest.mark.parametrize(("think", "rendered"), [("on", "<thinking=True>"), ("off", "<thinking=False>"), ("auto", "")])
def test_the_thinking_switch_reaches_the_template(nanoinfer: Program, think: str, rendered: str) -> None:
    nanoinfer("chat", "-p", "x", "--think", think)
    assert messages(nanoinfer, 0) == f"<user>x{rendered}<assistant>"


def test_a_template_without_a_system_role_gets_the_system_prompt_in_the_first_message(nanoinfer: Program) -> None:
    with_llm(nanoinfer, tokenizer=ByteTokenizer(system_role=False))
    result = nanoinfer("chat", "--system", "be brief", stdin="hi\nagain\n")
    assert result.code == 0
    assert messages(nanoinfer, 1) == "<user>be brief\n\nhi<assistant>BE BRIEF\n\nHI<user>again<assistant>"


def test_models_that_cannot_chat_are_refused(nanoinfer: Program) -> None:
    with_llm(nanoinfer, tokenizer=ByteTokenizer(chat_template=False))
    result = nanoinfer("chat", stdin="hi\n")
    assert result.code == 2
    assert "fake has no chat template: it continues text but does not chat." in result.err
    with_llm(nanoinfer, has_tokenizer=False)
    assert "fake has no tokenizer, so it cannot chat." in nanoinfer("chat", stdin="hi\n").err


def test_commands(nanoinfer: Program) -> None:
    result = nanoinfer(
        "chat",
        stdin=(
            "/help\n/stats\n/system be brief\n/set temperature 0.25\n/set think off\n"
            '/set stop "\\n"\n/set stop ""\n/set stop END\n'
            "/set stop\n/show\n"
            "hi\n/stats\n/cache\n/regen\n/undo\n/clear\n/system none\nlast\n/quit\nnever\n"
        ),
    )
    assert (result.code, result.out) == (0, "HI\nHI\nLAST\n")
    for line in (
        "/set [NAME [VALUE]]", "There is no answer yet.", "system prompt: be brief", "temperature is 0.25",
        "think is off", "stop is 'END'", "stop is '\\n'", "stop is none",
        "think off · thinking show · markdown on · stats off",
        "sampling: temperature 0.25, top_p 0.95, max_tokens none, stop 'END'", "conversation: 0 turns",
        "\n3 tok · ", "taken back: hi",
    ):  # fmt: skip
        assert line in result.err, line
    assert re.search(r"KV pool .* 1,024 blocks of 4 tokens\n .* 0 active", result.err)  # the panel of /cache
    assert re.search(r"TTFT +p50", result.err)  # the panel of /stats
    assert messages(nanoinfer, 1) == "<system>be brief<user>hi<thinking=False><assistant>"
    assert messages(nanoinfer, 2) == "<user>last<thinking=False><assistant>"


def test_save_load_and_read(nanoinfer: Program, tmp_path: Path) -> None:
    chat, notes = tmp_path / "my chat.json", tmp_path / "notes.txt"
    notes.write_text("\ufefffrom a file\n", encoding="utf-8")
    result = nanoinfer(
        "chat", "--system", "be brief",
        stdin=f"/save {chat}\nhi\n/save '{chat}'\n/save\n/read {notes}\n/show\nwhat is it?\n/show\n/save {notes}\n",
    )  # fmt: skip
    assert (result.code, result.out) == (0, "HI\nFROM A FILE\n\nWHAT IS IT?\n")
    for line in (
        "error: there is nothing to save yet.", f"1 turn saved in {chat}", f"1 turn saved again in {chat}",
        f"{notes}: 11 tokens of a context of 2,048; your next message comes after it.",
        "conversation: 1 turn, saved in", ", 1 file for the next message",
        f"error: {notes} exists; choose another name.",
    ):  # fmt: skip
        assert line in result.err, line
    assert notes.read_text(encoding="utf-8") == "\ufefffrom a file\n"
    result = nanoinfer("chat", stdin=f"lost\n/load {chat}\nagain\n")
    assert "1 turn loaded from" in result.err
    assert "the 1 turn before it is forgotten" in result.err
    assert "last: hi -> HI" in result.err
    assert messages(nanoinfer, 1) == "<system>be brief<user>hi<assistant>HI<user>again<assistant>"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("/exti", "error: unknown command /exti; did you mean /exit?"),
        ("/", 'error: "/" needs the name of a command behind it; /help lists them.'),
        ("/ help", 'error: "/" needs the name of a command behind it; /help lists them.'),
        ("/zzzz", "error: unknown command /zzzz; /help lists them."),
        ("/set temprature 1", "error: there is no setting 'temprature'; did you mean 'temperature'?"),
        ("/set temperature hot", "error: temperature is 'hot'; it must be a number from 0 to 100."),
        ("/set think maybe", "error: think is auto, on or off."),
        ("/set markdown maybe", "error: markdown is on or off."),
        ("/set thinking", "thinking is show (show, hide)."),
        ("/set", "/set NAME VALUE, where NAME is one of"),
        ("/save", "error: /save FILE: name the file to write."),
        ("/load", "error: /load FILE: name a file that /save wrote."),
        ("/load no-such-file", "error: cannot read no-such-file: No such file or directory."),
        ("/read", "error: /read FILE: name a text file;"),
        ("/read /dev/zero", "error: /dev/zero is a device or a pipe; name a file."),
        ("/load /dev/zero", "error: /dev/zero is a device or a pipe; name a file."),
        ("/read no-such-file", "error: cannot read no-such-file: No such file or directory."),
        (f"/read {HERE / 'fake_llm.py'}", "and the context is 2,048; give a shorter file."),
        (f"/load {HERE / 'fake_llm.py'}", "is not JSON (line 1:"),
        ("/unod", "error: unknown command /unod; did you mean /undo?"),
        ("/undo", "There is nothing to take back."),
        ("/regen", "There is no answer to generate again."),
    ],
)
def test_a_mistaken_command_is_one_line_and_never_reaches_the_model(
    nanoinfer: Program, command: str, message: str
) -> None:
    result = nanoinfer("chat", stdin=f"{command}\nhi\n")
    assert (result.code, result.out) == (0, "HI\n")
    assert message in result.err
    assert len(nanoinfer.llm.submitted) == 1


ALONE = ["/help", "/?", "/exit", "/quit", "/bye", "/regen", "/undo", "/clear", "/show", "/stats", "/cache"]


@pytest.mark.parametrize("name", ALONE)
def test_a_command_without_text_does_nothing_where_words_follow(nanoinfer: Program, name: str) -> None:
    result = nanoinfer("chat", stdin=f"hi\n{name} 5\nagain\n")
    assert (result.code, result.out) == (0, "HI\nAGAIN\n")
    assert f"error: {name} takes no words behind it; type it alone.\n" in result.err
    assert messages(nanoinfer, -1) == "<user>hi<assistant>HI<user>again<assistant>"


def test_a_full_context_is_told_and_the_chat_goes_on(nanoinfer: Program) -> None:
    with_llm(nanoinfer, max_model_len=100)
    result = nanoinfer("chat", stdin="short\n" + "x" * 90 + "\nagain\n")
    assert result.code == 3
    assert result.out == "SHORT\nAGAIN\n"
    assert "but this model takes 100" in result.err
    assert "The message was taken back." in result.err
    assert messages(nanoinfer, -1) == "<user>short<assistant>SHORT<user>again<assistant>"


def test_a_one_shot_prompt_that_is_too_long_is_bad_input(nanoinfer: Program) -> None:
    with_llm(nanoinfer, max_model_len=50)
    assert nanoinfer("chat", "-p", "x" * 60).code == 2


def test_an_answer_cut_while_thinking_is_explained(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "<think>" + "hm " * 100)
    result = nanoinfer("chat", "-p", "x", "--max-tokens", "30")
    assert (result.code, result.out) == (0, "")
    assert "cut while the model was still thinking" in result.err


def test_an_empty_prompt_and_json_without_a_prompt_are_refused(nanoinfer: Program) -> None:
    for arguments in (("-p", " "), ("--json",)):
        result = nanoinfer("chat", *arguments)
        assert (result.code, nanoinfer.llm) == (2, None)


def test_text_that_begins_with_a_slash_can_be_sent(nanoinfer: Program) -> None:
    assert nanoinfer("chat", stdin='"""/* a comment */\nx"""\n"""/one"""\n').out == "/* A COMMENT */\nX\n/ONE\n"


def test_a_file_of_one_token_has_a_token(nanoinfer: Program, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    assert "notes.txt: 1 token of a context" in nanoinfer("chat", stdin=f"/read {tmp_path / 'notes.txt'}\n").err


def test_a_binary_file_is_not_read(nanoinfer: Program, tmp_path: Path) -> None:
    for content, message in (
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"), (b"a\0b", "zero byte"), (b" \n", "is empty"),
        (b"x" * 70_000, "has 68.4 KiB, too much for a context of 2,048 tokens; cut it."),
    ):  # fmt: skip
        (tmp_path / "f").write_bytes(content)
        result = nanoinfer("chat", stdin=f"/read {tmp_path / 'f'}\nhi\n")
        assert (result.out, message in result.err) == ("HI\n", True)


def test_thinking_can_be_hidden_and_an_empty_answer_is_explained(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "<think>hm</think>")
    result = nanoinfer("chat", "--thinking", "hide", stdin="one\ntwo\n")
    assert (result.code, result.out) == (0, "")
    assert "[the model gave no answer; /regen asks again]" in result.err
    assert messages(nanoinfer, 1) == "<user>one\n\ntwo<assistant>"


def test_an_answer_cut_by_the_context_is_explained(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "word " * 100, max_model_len=100)
    result = nanoinfer("chat", stdin="hi\n/set max_tokens 5\n/regen\n")
    assert "the answer was cut: the context is full. /undo, /clear, or write on" in result.err
    assert "the answer was cut: max_tokens is reached. /set max_tokens N or none, then /regen." in result.err


def test_no_commands_are_advised_where_none_can_follow(nanoinfer: Program) -> None:
    with_llm(nanoinfer, reply=lambda prompt: "word " * 100, max_model_len=100)
    result = nanoinfer("chat", "-p", "hi", "--max-tokens", "5")
    assert "the answer was cut: max_tokens is reached. --max-tokens N allows more.\n" in result.err
    assert "the answer was cut: the context is full.\n" in nanoinfer("chat", "-p", "hi").err
