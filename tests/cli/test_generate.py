"""`nanoinfer generate` from the outside: results, failures and what a person is told, on a stand-in engine."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, die_at
from program import Program

from nanoinfer.cli.length_check import PromptLimits
from nanoinfer.errors import EngineError

HI = [{"role": "user", "content": "hello"}]


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def read_partial(path: Path) -> list[dict[str, Any]]:
    """The records that a run has left in its partial file."""
    return [line["record"] for line in read_lines(path)[1:]]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", {"prompt": "abc"}, {"id": 7, "messages": HI}, {"prompt": [104, 105]})


# -- results -----------------------------------------------------------------------------------------------------------


def test_answers_come_in_input_order_with_usage_and_timing(nanoinfer: Program, prompts: Path, tmp_path: Path) -> None:
    result = nanoinfer("generate", "-f", prompts, "-o", tmp_path / "out.jsonl")
    assert (result.code, result.out) == (0, "")
    text, chat, ids = read_lines(tmp_path / "out.jsonl")
    assert (text["custom_id"], text["index"], text["text"], text["finish_reason"]) == ("line-1", 0, "ABC", "stop")
    assert (chat["id"], chat["message"]) == (7, {"role": "assistant", "content": "HELLO"})
    assert (ids["text"], ids["token_ids"]) == ("HI", [72, 73, 256])
    assert text["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    timing = text["timing"]
    assert timing["e2e_ms"] == pytest.approx(timing["ttft_ms"] + 3 * timing["tpot_ms"], abs=0.01)
    assert text["error"] is None
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    assert nanoinfer.llm.closed


def test_results_go_to_standard_output_and_everything_else_to_standard_error(nanoinfer: Program, prompts: Path) -> None:
    result = nanoinfer("generate", "-f", prompts)
    assert [json.loads(line)["index"] for line in result.out.splitlines()] == [0, 1, 2]
    assert "fake: chosen by the test" in result.err
    assert "3 answers" in result.err


def test_one_prompt_from_the_command_line_prints_just_the_answer(nanoinfer: Program) -> None:
    assert nanoinfer("generate", "-p", "hello there").out == "HELLO THERE\n"
    record = json.loads(nanoinfer("generate", "-p", "hello there", "--json").out)
    assert record["message"]["content"] == "HELLO THERE"


def test_counts_of_one_have_singular_nouns(nanoinfer: Program, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    pool = ("--block-size", "1", "--max-tokens", "1")
    result = nanoinfer("generate", "-f", str(prompts), *pool)
    assert re.search(r"KV blocks of 1 token \(asked for\)", result.err)
    assert re.search(r"1 answer in .*: 1 prompt token \(0% cached\), 1 output token, ", result.err)
    shown = nanoinfer("inspect-cache", "-f", str(prompts), "--top", "1", *pool).out
    assert re.search(r"blocks of 1 token, ", shown)
    assert re.search(r"hits +0 of 1 prompt token \(", shown)


def test_prompts_are_read_from_standard_input(nanoinfer: Program) -> None:
    for arguments in ((), ("-f", "-")):
        result = nanoinfer("generate", *arguments, stdin="one\ntwo\n")
        assert [json.loads(line)["message"]["content"] for line in result.out.splitlines()] == ["ONE", "TWO"]
    assert json.loads(nanoinfer("generate", stdin='{"prompt": "x"}').out)["text"] == "X"


def test_prompts_are_raw_and_messages_go_through_the_template(nanoinfer: Program, prompts: Path) -> None:
    nanoinfer("generate", "-f", prompts, "--think", "off")
    assert [prompt for prompt, _, _ in nanoinfer.llm.submitted] == ["abc", HI, [104, 105]]
    assert nanoinfer.llm.submitted[1][2] == {"enable_thinking": False}


def test_sampling_comes_from_the_line_then_the_flag_then_the_model(nanoinfer: Program, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b", "temperature": 0.1, "max_tokens": 3})
    result = nanoinfer("generate", "-f", lines, "--top-k", "5", "--temperature", "0.2")
    first, second = (params for _, params, _ in nanoinfer.llm.submitted)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens) == (0.2, 0.95, 5, 512)
    assert (second.temperature, second.top_p, second.top_k, second.max_tokens) == (0.1, 0.95, 5, 3)
    assert result.err.count("sampling: temperature 0.2, top_k 5, top_p 0.95, max_tokens 512") == 1


def test_several_answers_a_prompt(nanoinfer: Program) -> None:
    record = json.loads(nanoinfer("generate", "-p", "x", "--n", "2", "--json").out)
    assert [choice["message"]["content"] for choice in record["choices"]] == ["X", "X"]


def test_several_answers_to_one_prompt_are_all_printed(nanoinfer: Program) -> None:
    assert nanoinfer("generate", "-p", "x", "--n", "2").out == "X\n\nX\n"


def test_text_files_and_unicode_survive(nanoinfer: Program, tmp_path: Path) -> None:
    text = "žluťoučký 漢字 😀 a\u2028b\u0085c"
    (tmp_path / "in.txt").write_text(text + "\n\n", encoding="utf-8")
    result = nanoinfer("generate", "-f", tmp_path / "in.txt")
    assert json.loads(result.out)["message"]["content"] == text.upper()
    assert len(result.out.splitlines()) == 1, "no reader may take one record for two"


def test_tokens_are_counted_by_their_ids_and_not_by_the_text_they_show(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, reply=lambda prompt: "漢字")
    record = json.loads(nanoinfer("generate", "-p", "x", "--json").out)
    assert record["message"]["content"] == "漢字"
    assert record["usage"]["completion_tokens"] == 7, "three bytes each, of which two show nothing, and the end"
    assert record["timing"]["e2e_ms"] == pytest.approx(
        record["timing"]["ttft_ms"] + 6 * record["timing"]["tpot_ms"], abs=0.01
    )


def test_more_lines_than_the_engine_takes_at_once_are_all_answered(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"id": i, "prompt": "x" * (1 + i % 5)} for i in range(40)])
    options = ("--max-num-seqs", "2", "--num-blocks", "8", "--block-size", "4")
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out", *options)
    assert result.code == 0
    assert [(r["id"], r["text"]) for r in read_lines(tmp_path / "out")] == [(i, "X" * (1 + i % 5)) for i in range(40)]


def test_control_characters_in_results_are_escaped(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, reply=lambda prompt: "\x1b[2J\x9b31m")
    result = nanoinfer("generate", "-p", "x", "--json")
    assert json.loads(result.out)["message"]["content"] == "\x1b[2J\x9b31m"
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in result.out.rstrip("\n"))


def test_the_summary_document(nanoinfer: Program, prompts: Path, tmp_path: Path) -> None:
    summary = json.loads(nanoinfer("generate", "-f", prompts, "-o", tmp_path / "o", "--json").out)
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (3, 0, 4 + 6 + 3)


def test_a_warning_when_many_answers_were_cut(nanoinfer: Program) -> None:
    assert "1 of 1 answer ended at the token limit" in nanoinfer("generate", "-p", "hello", "--max-tokens", "2").err
    assert "token limit" not in nanoinfer("generate", "-p", "hello").err


# -- a new user's mistakes: each message is true, short and helpful, and no model is loaded ----------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "line 1: not JSON: Expecting ',' delimiter at column 15."),
        ({"prompt": ""}, "line 1: the prompt is empty; write something."),
        ({"prompt": "a", "max_tokens": 0}, "line 1: max_tokens is 0; it must be a whole number from 1 to 2147483647."),
        ({"prompt": "a", "temprature": 1}, "line 1: unknown field 'temprature'; did you mean 'temperature'?"),
        ({"messages": HI, "tools": [{}]}, "line 1: 'tools' is not supported by nanoinfer; remove it."),
    ],
)
def test_a_file_without_a_valid_line_is_refused(nanoinfer: Program, tmp_path: Path, line: Any, message: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", line)
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out.jsonl")
    assert result.code == 2
    assert message in result.err
    assert "no line of" in result.err
    assert nanoinfer.llm is None
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_problem_that_quotes_the_line_stays_short(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a", "k" * 100_000: 1}, {"prompt": "b"})
    result = nanoinfer("generate", "-f", source)
    assert len(result.err) < 2000
    assert "k" * 100_000 in json.loads(result.out.splitlines()[0])["error"]["message"]


def test_an_empty_file_is_refused(nanoinfer: Program, tmp_path: Path) -> None:
    for content in ("", "\n \n"):
        (tmp_path / "in.jsonl").write_text(content)
        result = nanoinfer("generate", "-f", tmp_path / "in.jsonl")
        assert (result.code, nanoinfer.llm) == (2, None)
        assert "is empty; put one prompt on each line." in result.err


def test_a_missing_file_and_a_folder_are_refused(nanoinfer: Program, tmp_path: Path) -> None:
    assert "error: there is no file" in nanoinfer("generate", "-f", tmp_path / "none").err
    result = nanoinfer("generate", "-f", tmp_path)
    assert result.code == 2
    assert "is a folder; give a file of prompts." in result.err


@pytest.mark.parametrize("command", ["generate", "inspect-cache"])
def test_a_second_file_is_refused(nanoinfer: Program, tmp_path: Path, command: str) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"})
    for again in (("-f", source), (f"--file={source}",), (f"-f{source}",)):
        result = nanoinfer(command, "-f", source, *again)
        assert (result.code, result.out, nanoinfer.llm) == (2, "", None)
        assert f"put them together first: cat FILE1 FILE2 | nanoinfer {command} -f -" in result.err
    assert nanoinfer(command, "-f", source, "--stop=-f" if command == "generate" else "--top=3").code == 0


def test_bad_lines_become_error_records_and_the_rest_runs(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "x"},
        "",
        "{oops",
        {"id": "a", "prompt": "y"},
        {"prompt": "z" * 3000},
    )
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out")
    assert result.code == 3
    good, broken, twice, long = read_lines(tmp_path / "out")
    assert good["text"] == "X"
    assert (broken["custom_id"], broken["error"]["code"]) == ("line-3", "invalid_request")
    assert twice["error"]["code"] == "duplicate_id"
    assert long["error"]["code"] == "prompt_too_long"
    assert "2 of 4 lines cannot run" in result.err
    assert "the id 'a' is already used on line 1" in result.err
    assert "warning: line 5: the prompt has 3000 tokens, but this model takes 2048" in result.err
    assert "1 answer, 3 failed" in result.err


def test_prompts_that_are_too_long_are_found_before_the_load(nanoinfer: Program, tmp_path: Path) -> None:
    nanoinfer.limits = PromptLimits(2048, lambda prompt, options: len(str(prompt)))
    long = {"id": "long", "messages": [{"role": "user", "content": "z" * 3000}]}
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, long, {"prompt": [1] * 2048}, {"prompt": [1] * 2047})
    result = nanoinfer("generate", "-f", source, "--validate-only", "--json")
    assert (result.code, nanoinfer.llm) == (2, None)
    problems = json.loads(result.out)["problems"]
    assert [(problem["line"], problem["code"]) for problem in problems] == [
        (2, "prompt_too_long"),
        (3, "prompt_too_long"),
    ]
    assert "has 2048 tokens, but this model takes 2048 with at least one for the answer" in problems[1]["message"]


def test_a_run_in_which_every_line_fails_is_no_success(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", *[{"prompt": "z" * 3000}] * 2)
    result = nanoinfer("generate", "-f", source)
    assert result.code == 3
    assert [json.loads(line)["error"]["code"] for line in result.out.splitlines()] == ["prompt_too_long"] * 2
    assert "0 answers, 2 failed" in result.err


def test_skip_leaves_bad_lines_out(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, {"prompt": ""}, {"prompt": "y"})
    result = nanoinfer("generate", "-f", source, "--on-error", "skip")
    assert result.code == 3
    assert [json.loads(line)["text"] for line in result.out.splitlines()] == ["X", "Y"]


def test_fail_refuses_the_file_before_anything_runs(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, {"prompt": ""})
    result = nanoinfer("generate", "-f", source, "--on-error", "fail", "-o", tmp_path / "out")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "has 1 bad line; nothing was run (--on-error fail)." in result.err


def test_fail_refuses_a_prompt_that_only_the_engine_can_judge(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, {"prompt": "z" * 3000})
    result = nanoinfer("generate", "-f", source, "--on-error", "fail", "-o", tmp_path / "out")
    assert result.code == 2
    assert "line 2: the prompt has 3000 tokens" in result.err
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_max_errors_stops_and_keeps_what_there_is(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, *[{"prompt": "z" * 3000}] * 3, {"prompt": "y"})
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out", "--max-errors", "1")
    assert result.code == 3
    assert "stopped after 2 failed requests (--max-errors 1)" in result.err
    assert len(read_partial(tmp_path / "out.partial")) == 2


def test_more_bad_lines_than_max_errors_are_refused_before_the_load(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "x"}, "{", "{")
    result = nanoinfer("generate", "-f", source, "--max-errors", "1")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "2 bad lines, more than --max-errors 1" in result.err


def test_at_most_twenty_problems_are_shown(nanoinfer: Program, tmp_path: Path) -> None:
    result = nanoinfer("generate", "-f", write_lines(tmp_path / "in.jsonl", *["{"] * 30))
    assert result.err.count("not JSON") == 20
    assert "... and 10 more" in result.err


def test_validate_only_never_loads_a_model(nanoinfer: Program, tmp_path: Path) -> None:
    good = write_lines(tmp_path / "good.jsonl", {"prompt": "x"})
    bad = write_lines(tmp_path / "bad.jsonl", {"prompt": "x"}, {"id": "q", "prompt": ""})
    assert nanoinfer("generate", "-f", good, "--validate-only").code == 0
    result = nanoinfer("generate", "-f", bad, "--validate-only", "--json")
    assert (result.code, nanoinfer.llm) == (2, None)
    problem = {"line": 2, "id": "q", "code": "empty_prompt", "message": "the prompt is empty; write something."}
    assert json.loads(result.out)["problems"] == [problem]


@pytest.mark.parametrize("target", ["missing/out.jsonl", ".", "in.jsonl", "taken.jsonl"])
def test_an_output_that_cannot_be_is_refused_before_the_load(
    nanoinfer: Program, prompts: Path, tmp_path: Path, target: str
) -> None:
    (tmp_path / "taken.jsonl").write_text("mine")
    result = nanoinfer("generate", "-f", prompts, "-o", tmp_path / target)
    assert (result.code, nanoinfer.llm) == (2, None)
    assert (tmp_path / "taken.jsonl").read_text() == "mine"


def test_an_unwritable_output_is_refused_before_the_load(
    nanoinfer: Program, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    result = nanoinfer("generate", "-f", prompts, "-o", tmp_path / "out")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "out.partial: Permission denied; choose another output." in result.err


def test_both_ways_to_give_prompts_contradict(nanoinfer: Program, prompts: Path) -> None:
    assert nanoinfer("generate", "-f", prompts, "-p", "x").code == 2


def test_no_step_waits_for_many_prompts(nanoinfer: Program, tmp_path: Path) -> None:
    """Twice as many prompts as run at once were tokenized before the first step."""
    handed_in: list[int] = []

    def before_step(step: int) -> None:
        handed_in.append(len(nanoinfer.llm.submitted))

    nanoinfer.make = lambda config: FakeLLM(config, before_step=before_step)
    (tmp_path / "in.txt").write_text("".join(f"a prompt with the number {i}\n" for i in range(100)))
    result = nanoinfer("generate", "-f", tmp_path / "in.txt", "--max-num-seqs", "20")
    assert (result.code, result.out.count("\n")) == (0, 100)
    assert handed_in[:4] == [28, 36, 40, 40]
    assert max(after - before for before, after in itertools.pairwise(handed_in)) <= 20 + 8
    assert handed_in[-1] == 100


def test_an_empty_prompt_option_is_refused(nanoinfer: Program) -> None:
    result = nanoinfer("generate", "-p", "")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert "the prompt is empty" in result.err


# -- ends that come early ----------------------------------------------------------------------------------------------


def test_an_engine_that_dies_leaves_the_finished_results(nanoinfer: Program, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b" * 50})
    nanoinfer.make = lambda config: FakeLLM(config, before_step=die_at(10))
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out")
    assert result.code == 1
    assert "error: the device went away." in result.err
    assert "1 of 2 results are in" in result.err
    assert "Traceback" not in result.err
    assert [record["text"] for record in read_partial(tmp_path / "out.partial")] == ["A"]
    assert not (tmp_path / "out").exists()


def test_verbose_shows_the_traceback(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, before_step=die_at(0, EngineError("boom")))
    result = nanoinfer("generate", "-p", "x", "-v")
    assert result.code == 1
    assert "Traceback" in result.err


def test_a_traceback_shows_no_prompt(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, before_step=die_at(0, ZeroDivisionError("division by zero")))
    result = nanoinfer("generate", "-p", "private words", "-v")
    assert "Traceback" in result.err
    assert "private" not in result.err


def test_an_unexpected_error_is_one_sentence(nanoinfer: Program) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, before_step=die_at(0, ZeroDivisionError("division by zero")))
    result = nanoinfer("generate", "-p", "x")
    assert result.code == 1
    assert "error: ZeroDivisionError: division by zero. This is unexpected; -v shows where it happened." in result.err


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_run_after_its_step_and_keeps_the_results(
    nanoinfer: Program, tmp_path: Path, signum: int, code: int
) -> None:
    def before_step(step: int) -> None:
        if step == 10:
            signal.raise_signal(signum)

    source = write_lines(tmp_path / "in.jsonl", {"prompt": "a"}, {"prompt": "b" * 50})
    nanoinfer.make = lambda config: FakeLLM(config, before_step=before_step)
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out")
    assert result.code == code
    assert "1 of 2 results are in" in result.err
    assert [record["text"] for record in read_partial(tmp_path / "out.partial")] == ["A"]
    assert nanoinfer.llm.closed


def test_a_second_interrupt_does_not_wait_for_the_step(nanoinfer: Program) -> None:
    reached = []

    def before_step(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        reached.append("after the first")
        signal.raise_signal(signal.SIGINT)
        reached.append("after the second")

    nanoinfer.make = lambda config: FakeLLM(config, before_step=before_step)
    assert nanoinfer("generate", "-p", "x").code == 130
    assert reached == ["after the first"]


def test_an_interrupted_run_is_not_overwritten_by_the_next(nanoinfer: Program, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").write_text("precious\n")
    result = nanoinfer("generate", "-f", prompts, "-o", tmp_path / "out")
    assert (result.code, nanoinfer.llm) == (2, None)
    assert (tmp_path / "out.partial").read_text() == "precious\n"
    assert nanoinfer("generate", "-f", prompts, "-o", tmp_path / "out", "--overwrite").code == 0


def test_events_and_cache_snapshot_files(nanoinfer: Program, prompts: Path, tmp_path: Path) -> None:
    events, snapshot = tmp_path / "events.jsonl", tmp_path / "cache.json"
    assert nanoinfer("generate", "-f", prompts, "--events", events, "--cache-snapshot", snapshot).code == 0
    header, *steps = read_lines(events)
    assert header["engine"]["model"] == "fake"
    assert sum(sequence["output_tokens"] for step in steps for sequence in step["finished"]) == 4 + 6 + 3
    assert json.loads(snapshot.read_text())["num_blocks"] == 1024
    missing = tmp_path / "no" / "events"
    assert nanoinfer("generate", "-p", "x", "--events", missing).code == 2


@pytest.mark.parametrize("option", ["--events", "--cache-snapshot"])
@pytest.mark.parametrize("lines", [2, 200])
def test_a_full_disk_under_a_file_written_along_the_way_is_named(
    nanoinfer: Program, tmp_path: Path, option: str, lines: int
) -> None:
    """At the end, or, with more events than a buffer holds, in the middle."""
    source = write_lines(tmp_path / "in.jsonl", *[{"prompt": "x" * 20}] * lines)
    result = nanoinfer("generate", "-f", source, "-o", tmp_path / "out", option, "/dev/full")
    assert result.code == 1
    assert "error: cannot write /dev/full: No space left on device." in result.err
    assert ("results are in" in result.err) == (tmp_path / "out.partial").exists()
