"""`nanoinfer chat` on a pseudo-terminal, as a person types into it."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

HERE = Path(__file__).parent
# An empty prompt that waits for keys, as prompt_toolkit draws it.
PROMPT = r">>>\x1b\[3D\x1b\[4C[^>]*\x1b\[\?25h"
Start = Callable[..., pexpect.spawn]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a chat on a terminal of 80 x 24; `settings` are names from fake_main."""
    children = []

    def spawn(
        *settings: str, arguments: tuple[str, ...] = (), stdout: Path | None = None, wait: bool = True, **more: str
    ) -> pexpect.spawn:
        environment = {
            **os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path),
            "PROMPT_TOOLKIT_NO_CPR": "1", **more,
        }  # fmt: skip
        for name in ("NO_COLOR", "CI"):
            environment.pop(name, None)
        program = [sys.executable, str(HERE / "fake_main.py"), *settings, "--", "chat", *arguments]
        command = f"exec {shlex.join(program)}" + (f" >{shlex.quote(str(stdout))}" if stdout else "")
        child = pexpect.spawn(
            "/bin/sh", ["-c", command], env=environment, encoding="utf-8", timeout=20, dimensions=(24, 80)
        )
        children.append(child)
        if wait:
            child.expect(PROMPT)
        return child

    yield spawn
    for child in children:
        child.close(force=True)


def code_of(child: pexpect.spawn) -> int | None:
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus  # type: ignore[no-any-return]


def test_a_conversation_and_control_d(start: Start) -> None:
    child = start()
    child.send("hello\r")
    child.expect("HELLO\r\n")
    child.expect(r"6 tok · (.|\r\n)*prompt 22 \(0 cached, 0%\) · stop")
    child.expect(PROMPT)
    child.send("\x04")
    assert code_of(child) == 0


def test_control_c_stops_the_answer_and_keeps_the_partial_text(start: Start) -> None:
    child = start("endless")
    child.send("go\r")
    child.expect("word word word")
    child.sendintr()
    child.expect("stopped; the text so far is kept")
    child.expect(PROMPT)
    child.send("/undo\r")
    child.expect("taken back: go")
    child.expect(PROMPT)
    child.send("/exit\r")
    assert code_of(child) == 0


def test_control_c_while_thinking_keeps_the_question(start: Start) -> None:
    child = start("thinks-long")
    child.send("go\r")
    child.expect("hm hm")
    child.sendintr()
    child.expect("stopped; there is no answer yet; /regen asks again")
    child.expect(PROMPT)
    child.send("/undo\r")
    child.expect("taken back: go")


def test_a_second_control_c_leaves_with_130(start: Start) -> None:
    child = start("endless", "is-quick")
    child.send("go\r")
    child.expect("word word word")
    child.sendintr()
    child.expect(PROMPT)
    child.sendintr()
    assert code_of(child) == 130


def test_control_c_some_time_after_a_stopped_answer_says_how_to_leave(start: Start) -> None:
    child = start("endless", "takes-time")
    child.send("go\r")
    child.expect("word word word")
    child.sendintr()
    child.expect(PROMPT)
    child.sendintr()
    child.expect("Ctrl-D or /exit leaves")
    child.expect(PROMPT)
    child.sendeof()
    assert code_of(child) == 0


def test_control_c_at_the_prompt_clears_the_line(start: Start) -> None:
    child = start()
    child.send("half a thou")
    child.expect("half a thou")
    child.sendintr()
    child.send("hi\r")
    child.expect("HI\r\n")
    child.expect(PROMPT)
    child.sendintr()
    child.expect("Ctrl-D or /exit leaves")
    child.expect(PROMPT)
    child.sendeof()
    assert code_of(child) == 0


def test_the_models_text_never_drives_the_terminal(start: Start) -> None:
    child = start("rude")
    child.send("x\r")
    child.expect("␛\\[2J␛\\[31mred␛\\]0;title␇")
    assert "\x1b[31m" not in child.before
    assert "\x1b[2J" not in child.before


def test_thinking_is_shown_dim_before_the_answer(start: Start) -> None:
    child = start("thinks")
    child.send("yes\r")
    child.expect(r"\x1b\[2mlet me see")
    child.expect("YES\r\n")


def full(start: Start) -> pexpect.spawn:
    """A chat that asks what to forget, its context of 100 tokens being too short for a second question."""
    child = start("small")
    child.send("a question\r")
    child.expect("A QUESTION")
    child.expect(PROMPT)
    child.send("x" * 35 + "\r")
    said = "the context is full: the conversation has 89 of 100 tokens, 11 of 12 are left for the answer"
    child.expect(said.replace(" ", r"\s+"))  # over two rows
    for line in (
        "o  forget the 1 oldest turn of 2",
        "c  clear all",
        "s  shorter answer, of at most 11",
        "b  take this",
    ):
        child.expect(line)
    child.expect("o/c/s/b>")
    return child


@pytest.mark.parametrize(
    ("choice", "outcome"),
    [
        ("o", "1 turn forgotten; the rest is read anew.*X{35}\r\n"),
        ("c", "1 turn forgotten; the rest is read anew.*X{35}\r\n"),
        ("s", "X{11}\r\n.*cut: the context is full"),
        ("b", r"\r\n"),
    ],
)
def test_a_full_context_offers_a_choice(start: Start, choice: str, outcome: str) -> None:
    child = full(start)
    child.send(f"?\r{choice}\r")
    child.expect(outcome)
    child.expect(PROMPT)
    child.send("/show\r")
    child.expect("conversation: " + {"s": "2 turns", "b": "1 turn\r"}.get(choice, "1 turn\r"))


def test_control_c_at_the_choice_takes_the_message_back(start: Start) -> None:
    child = full(start)
    child.sendintr()
    child.expect(PROMPT)
    child.send("/show\r")
    child.expect("conversation: 1 turn\r")


def test_typed_lines_are_remembered_in_a_file_of_ones_own(start: Start, tmp_path: Path) -> None:
    child = start()
    child.send("remember me\r")
    child.expect("REMEMBER ME")
    child.expect(PROMPT)
    child.sendeof()
    assert code_of(child) == 0
    history = tmp_path / "nanoinfer" / "history"
    assert "remember me" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    again = start()
    again.send("\x1b[A")
    again.expect("remember me")


def test_no_history(start: Start, tmp_path: Path) -> None:
    child = start(arguments=("--no-history",))
    child.send("secret\r")
    child.expect("SECRET")
    child.expect(PROMPT)
    child.sendeof()
    assert code_of(child) == 0
    assert not (tmp_path / "nanoinfer").exists()


def test_a_pasted_text_of_several_lines_is_one_message(start: Start) -> None:
    child = start()
    child.send("\x1b[200~one\ntwo\x1b[201~\r")
    child.expect("ONE\r\nTWO\r\n")


def test_control_z_suspends_the_chat_and_fg_goes_on_with_it(tmp_path: Path) -> None:
    environment = {
        **os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path),
        "PROMPT_TOOLKIT_NO_CPR": "1", "PS1": "shell: ",
    }  # fmt: skip
    child = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "--noediting", "-i"], env=environment, encoding="utf-8", timeout=20
    )
    child.expect("shell: ")
    child.sendline(shlex.join([sys.executable, str(HERE / "fake_main.py"), "endless", "--", "chat"]))
    child.expect(PROMPT)
    child.send("go\x1a")
    child.expect("Stopped")
    child.sendline("fg")
    child.expect(">>>")
    child.send("\r")
    child.expect("word word word")
    child.send("\x1a")
    child.expect("Stopped")
    child.sendline("fg")
    child.expect("word word word")
    child.sendintr()
    child.expect("stopped; the text so far is kept")
    child.expect(PROMPT)
    child.sendeof()
    child.expect("shell: ")
    child.sendline("echo code $?")
    child.expect("code 0")
    child.close(force=True)


def test_a_message_can_be_written_in_ones_own_editor(start: Start, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf "%s and\\nmore" "$(cat "$1")" > "$1"\n')
    editor.chmod(0o755)
    child = start(EDITOR=str(editor))
    child.send("begun\x18\x05")
    child.expect("more")
    child.send("\r")
    child.expect("BEGUN AND\r\nMORE\r\n")


def test_answers_alone_go_to_a_redirected_standard_output(start: Start, tmp_path: Path) -> None:
    child = start("thinks", stdout=tmp_path / "out.txt")
    child.send("hello\r")
    child.expect(PROMPT)
    child.sendeof()
    assert code_of(child) == 0
    assert (tmp_path / "out.txt").read_text() == "HELLO\n"


def test_one_shot_prints_the_answer_and_leaves(start: Start) -> None:
    child = start(arguments=("-p", "hello"), wait=False)
    child.expect("HELLO\r\n")
    assert code_of(child) == 0


def test_control_c_in_a_one_shot_leaves_with_130(start: Start) -> None:
    child = start("endless", arguments=("-p", "hello"), wait=False)
    child.expect("word word word")
    child.sendintr()
    assert code_of(child) == 130
