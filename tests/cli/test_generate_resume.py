"""`nanoinfer generate --resume`: what is kept, what runs again, what is refused, and the command that is printed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, die_at
from program import Program, Result
from test_generate import read_lines, read_partial, write_lines

from nanoinfer.cli.resume import resume_command

LINES = [{"id": name, "prompt": name * size} for name, size in (("a", 1), ("b", 9), ("c", 2), ("d", 8), ("e", 3))]


class Batch:
    """A prompts file and its runs; `interrupt` ends the first one when the engine comes to `step`."""

    def __init__(self, nanoinfer: Program, folder: Path) -> None:
        self.nanoinfer, self.folder = nanoinfer, folder
        self.source, self.out, self.partial = folder / "in.jsonl", folder / "out", folder / "out.partial"
        self.write(*LINES)

    def write(self, *lines: Any) -> None:
        write_lines(self.source, *lines)

    def run(self, *arguments: str) -> Result:
        self.nanoinfer.make = FakeLLM
        return self.nanoinfer("generate", "-f", self.source, "-o", self.out, *arguments)

    def interrupt(self, *arguments: str, step: int = 6) -> Result:
        self.nanoinfer.make = lambda config: FakeLLM(
            config, before_step=lambda number: signal.raise_signal(signal.SIGINT) if number == step else None
        )
        result = self.nanoinfer("generate", "-f", self.source, "-o", self.out, *arguments)
        assert result.code == 130
        return result

    def texts(self) -> list[str]:
        return [record["text"] for record in read_lines(self.out)]

    def asked(self) -> list[Any]:
        return [prompt for prompt, _, _ in self.nanoinfer.llm.submitted]


@pytest.fixture
def batch(nanoinfer: Program, tmp_path: Path) -> Batch:
    return Batch(nanoinfer, tmp_path)


def test_only_what_is_missing_runs_and_the_file_is_that_of_one_run(batch: Batch) -> None:
    whole = batch.run()
    assert whole.code == 0
    expected = read_lines(batch.out)
    batch.out.unlink()
    batch.interrupt()
    assert [record["id"] for record in read_partial(batch.partial)] == ["a", "c", "e"]
    result = batch.run("--resume")
    assert result.code == 0
    assert "resuming: 3 results kept from" in result.err
    assert "2 lines to run." in result.err
    assert "5 answers (3 from before) in" in result.err
    assert batch.asked() == ["b" * 9, "d" * 8]
    assert [without_timing(record) for record in read_lines(batch.out)] == [without_timing(r) for r in expected]
    assert not batch.partial.exists()


def without_timing(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("timing", "usage")}


def test_what_is_complete_needs_no_model(batch: Batch) -> None:
    batch.interrupt()
    batch.write(*[LINES[i] for i in (0, 2, 4)])
    batch.nanoinfer.llm = None
    result = batch.run("--resume", "--json")
    assert (result.code, batch.nanoinfer.llm) == (0, None)
    assert batch.texts() == ["A", "CC", "EEE"]
    assert "3 answers, all from before" in result.err
    assert json.loads(result.out)["kept_from_before"] == 3


def test_the_printed_command_resumes(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    batch.source = batch.folder / "my prompts' file.jsonl"
    batch.write(*LINES)
    monkeypatch.setattr("sys.argv", ["/somewhere/else/nanoinfer", "..."])
    result = batch.interrupt("--stop", "a $b", "--overwrite")
    [command] = [line for line in result.err.splitlines() if line.endswith("--resume")]
    program, *words = shlex.split(command)
    assert program == "/somewhere/else/nanoinfer", "it is not on the PATH, so its name alone would not do"
    assert words == ["generate", "-f", str(batch.source), "-o", str(batch.out), "--stop", "a $b", "--resume"]
    assert "3 of 5 results are in" in result.err
    batch.nanoinfer.make = FakeLLM
    assert batch.nanoinfer(*words).code == 0
    monkeypatch.setattr("sys.argv", ["/x/nanoinfer/__main__.py"])
    batch.out.unlink()
    assert " -m nanoinfer generate -f " in batch.interrupt().err


def test_every_early_end_prints_the_command_if_something_was_done(batch: Batch, tmp_path: Path) -> None:
    nanoinfer = batch.nanoinfer
    for error, code in ((None, 1), (ZeroDivisionError("x"), 1)):
        nanoinfer.make = lambda config, error=error: FakeLLM(config, before_step=die_at(6, error))
        result = nanoinfer("generate", "-f", batch.source, "-o", batch.out, "--overwrite")
        assert (result.code, "--resume" in result.err) == (code, True)
    assert "--resume" not in batch.interrupt("--overwrite", step=0).err
    assert not batch.partial.exists()
    assert batch.run("--resume").code == 0


def test_prompts_from_standard_input_have_to_come_again(batch: Batch) -> None:
    def before_step(step: int) -> None:
        if step == 6:
            signal.raise_signal(signal.SIGINT)

    text = batch.source.read_text()
    batch.nanoinfer.make = lambda config: FakeLLM(config, before_step=before_step)
    result = batch.nanoinfer("generate", "-o", batch.out, stdin=text)
    assert "To go on from there; give it the same prompts on standard input:" in result.err
    batch.nanoinfer.make = FakeLLM
    assert batch.nanoinfer("generate", "-o", batch.out, "--resume", stdin=text).code == 0
    assert len(batch.texts()) == 5


def test_lines_may_move_and_come_but_not_change_or_go(batch: Batch) -> None:
    batch.interrupt()
    new = {"id": "new", "prompt": "n"}
    batch.write(new, *reversed(LINES))
    assert batch.run("--resume").code == 0
    assert batch.texts() == ["N", "EEE", "DDDDDDDD", "CC", "BBBBBBBBB", "A"]
    assert [record["index"] for record in read_lines(batch.out)] == list(range(6))

    batch.out.unlink()
    batch.write(*LINES)
    batch.interrupt()
    before = batch.partial.read_bytes()
    batch.nanoinfer.llm = None
    batch.write({"id": "a", "prompt": "other"}, LINES[1], {**LINES[2], "temperature": 0.1}, LINES[3])
    result = batch.run("--resume")
    assert (result.code, batch.nanoinfer.llm) == (2, None)
    for problem in ("line 1 (id 'a') has changed", "line 3 (id 'c') has changed", "id 'e' is no longer there"):
        assert problem in result.err
    assert "3 answered lines of" in result.err
    assert "put back what was there" in result.err
    assert batch.partial.read_bytes() == before


def test_lines_without_ids_are_known_by_their_text(batch: Batch) -> None:
    lines = [{"prompt": line["prompt"]} for line in LINES]
    batch.write(*lines)
    batch.interrupt()
    batch.write({"prompt": "first"}, *lines)
    result = batch.run("--resume")
    assert result.code == 2, "what was line 1 is line 2 now"
    assert "line 1 (id 'line-1') has changed" in result.err


def test_equal_lines_are_counted(batch: Batch) -> None:
    batch.write('{"id": "x", "prompt": "a"}', *['{"id": "x", "prompt": "b"}'] * 2, {"id": "y", "prompt": "y" * 9})
    batch.interrupt()
    assert len(read_partial(batch.partial)) == 3
    assert batch.run("--resume").code == 3
    assert batch.asked() == ["y" * 9]
    assert len(read_lines(batch.out)) == 4


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ((), ("--temperature", "0.5"), "temperature was 0.6 and is now 0.5"),
        ((), ("--max-tokens", "9"), "max_tokens was 512 and is now 9"),
        (("--seed", "1"), (), "seed was 1 and is now 0"),
        (("--max-model-len", "99"), (), "max_model_len was 99 and is now auto"),
        (("--think", "off"), ("--n", "2"), 'think was "off" and is now "auto", n was 1 and is now 2'),
        (("--stop", "x"), ("--stop", "y"), 'stop was ["x"] and is now ["y"]'),
    ],
)
def test_other_parameters_are_refused_before_the_load(
    batch: Batch, before: tuple[str, ...], after: tuple[str, ...], difference: str
) -> None:
    batch.interrupt(*before)
    batch.nanoinfer.llm = None
    result = batch.run("--resume", *after)
    assert (result.code, batch.nanoinfer.llm) == (2, None)
    for part in difference.split(", "):
        assert part in result.err
    assert "or start over with --overwrite" in result.err


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        ("model", 'model was "fake" and is now "other"'),
        ("dtype", 'dtype was "float32" and is now "bfloat16"'),
        ("files", "the model's files are not the same"),
        ("default", "temperature was 0.6 and is now 0.1"),
    ],
)
def test_what_only_the_loaded_model_knows_is_compared_too(batch: Batch, name: str, difference: str) -> None:
    from dataclasses import replace

    def make(config: Any) -> FakeLLM:
        llm = FakeLLM(config)
        if name == "files":
            (batch.folder / "config.json").write_text("{}")
            llm.model_folder = batch.folder
        elif name == "default":
            llm.default_sampling = replace(llm.default_sampling, temperature=0.1)
        else:
            llm.info = replace(llm.info, **{name: {"model": "other", "dtype": "bfloat16"}[name]})
        return llm

    batch.interrupt()
    before = batch.partial.read_bytes()
    batch.nanoinfer.make = make
    result = batch.nanoinfer("generate", "-f", batch.source, "-o", batch.out, "--resume")
    assert result.code == 2
    assert difference in result.err
    assert "To go on" not in result.err, "the same command would be refused again"
    assert batch.partial.read_bytes() == before


def test_what_does_not_shape_an_answer_may_change(batch: Batch) -> None:
    batch.interrupt()
    options = ("--max-num-seqs", "1", "--no-enable-prefix-caching", "--block-size", "8", "--order", "completion")
    assert batch.run("--resume", *options).code == 0
    assert batch.texts() == ["A", "CC", "EEE", "BBBBBBBBB", "DDDDDDDD"]


def test_failures_are_kept_unless_they_are_to_be_tried_again(batch: Batch) -> None:
    long = {"id": "long", "prompt": "z" * 3000}
    batch.write("{oops", long, *LINES)
    batch.interrupt()
    partial = batch.partial.read_bytes()
    assert len(read_partial(batch.partial)) == 5
    result = batch.run("--resume", "--max-errors", "0")
    assert result.code == 3, "failures of the run before do not count"
    assert "5 answers (3 from before), 2 failed" in result.err
    assert batch.asked() == ["b" * 9, "d" * 8]

    batch.out.unlink()
    batch.partial.write_bytes(partial)
    assert batch.run("--resume", "--retry-errors").code == 3
    assert batch.asked() == ["z" * 3000, "b" * 9, "d" * 8]
    assert [record["error"] is None for record in read_lines(batch.out)] == [False] * 2 + [True] * 5
    assert batch.run("--retry-errors", "--overwrite").code == 2


def test_failed_lines_may_be_corrected_before_resuming(batch: Batch) -> None:
    batch.write("{oops", {"id": "q", "prompt": ""}, *LINES)
    batch.interrupt()
    batch.write({"id": "p", "prompt": "p"}, {"id": "q", "prompt": "q"}, *LINES)
    result = batch.run("--resume")
    assert result.code == 0
    assert batch.texts() == ["P", "Q", "A", "B" * 9, "CC", "D" * 8, "EEE"]


def test_skipped_failures_are_remembered_but_not_in_the_result(batch: Batch) -> None:
    batch.write({"id": "long", "prompt": "z" * 3000}, *LINES)
    batch.interrupt("--on-error", "skip")
    assert batch.run("--resume", "--on-error", "skip").code == 3
    assert "z" * 3000 not in batch.asked()
    assert len(batch.texts()) == 5


def test_stopping_after_too_many_errors_can_be_resumed(batch: Batch) -> None:
    batch.write(LINES[0], *[{"id": i, "prompt": "z" * 3000} for i in range(3)], LINES[2])
    result = batch.run("--max-errors", "1")
    assert (result.code, "--resume" in result.err) == (3, True)
    assert batch.run("--resume", "--max-errors", "1").code == 3
    assert len(read_lines(batch.out)) == 5


def test_nothing_to_resume(batch: Batch) -> None:
    result = batch.run("--resume")
    assert result.code == 0
    assert "note: there is nothing to resume for" in result.err
    assert batch.nanoinfer("generate", "-f", batch.source, "--resume").code == 2


def test_failed_lines_of_a_complete_output_run_again(batch: Batch) -> None:
    batch.write({"id": "bad", "prompt": ""}, *LINES)
    assert batch.run().code == 3
    answers = read_lines(batch.out)[1:]
    batch.write(*LINES, {"id": "bad", "prompt": "good now"})
    result = batch.run("--resume", "--retry-errors")
    assert result.code == 0
    assert f"trying 1 failed line of {batch.out} again; its 5 answers stay as they are" in result.err
    assert batch.asked() == ["good now"]
    records = read_lines(batch.out)
    assert [record["index"] for record in records] == list(range(6))
    assert records[:5] == [answer | {"index": index} for index, answer in enumerate(answers)]
    assert records[5]["text"] == "GOOD NOW"
    assert not batch.partial.exists()


def test_a_complete_output_with_an_id_that_comes_twice_is_complete(batch: Batch) -> None:
    batch.write(*LINES[:2], LINES[0])
    assert batch.run().code == 3
    result = batch.run("--resume")
    assert (result.code, "is complete: 3 results, 1 of them failures" in result.err) == (3, True)


def test_trying_failed_lines_again_can_be_interrupted_and_resumed(batch: Batch) -> None:
    batch.write({"id": "bad", "prompt": ""}, *LINES)
    assert batch.run().code == 3
    before = batch.out.read_bytes()
    batch.write({"id": "bad", "prompt": "good now"}, *LINES)
    result = batch.interrupt("--resume", "--retry-errors", step=2)
    assert "5 of 6 results are in" in result.err
    assert batch.out.read_bytes() == before
    assert batch.run("--resume", "--retry-errors").code == 0
    assert batch.asked() == ["good now"]
    assert batch.texts() == ["GOOD NOW", *(record["text"] for record in map(json.loads, before.splitlines()[1:]))]


def test_resume_and_overwrite_contradict(batch: Batch) -> None:
    assert "contradict each other" in batch.run("--resume", "--overwrite").err


def test_resuming_what_is_complete_does_nothing(batch: Batch) -> None:
    batch.write({"id": "bad", "prompt": ""}, *LINES)
    assert batch.run().code == 3
    before, batch.nanoinfer.llm = batch.out.read_bytes(), None
    for options, advice in ((), "--retry-errors runs them again"), (("--retry-errors",), "none of these lines can run"):
        result = batch.run("--resume", *options)
        assert (result.code, batch.nanoinfer.llm) == (3, None)
        assert f"is complete: 6 results, 1 of them failures ({advice})." in result.err
    batch.write(*LINES, {"id": "new", "prompt": "new"})
    result = batch.run("--resume")
    assert (result.code, batch.nanoinfer.llm) == (2, None)
    assert "exists and is not the result of these prompts; give another name, or --overwrite" in result.err
    batch.out.write_text("something else")
    assert batch.run("--resume").code == 2
    assert before != batch.out.read_bytes() == b"something else"


def test_words_that_a_terminal_cannot_show_are_printed_so_that_a_shell_reads_them(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["nanoinfer"])
    words = ["generate", "-p", "two\nlines \x1b[2J it's \\", "-p", "caf\u00e9 $HOME", "-o", os.fsdecode(b"\xff")]
    command = resume_command(words)
    assert command.isprintable()
    shown = subprocess.run(["bash", "-c", f"nanoinfer() {{ printf '%s\\0' \"$@\"; }}; {command}"], capture_output=True)
    assert shown.stdout.split(b"\0")[:-1] == [*map(os.fsencode, words), b"--resume"]


def test_an_output_that_appeared_meanwhile_stops_a_resume_before_the_load(batch: Batch) -> None:
    batch.interrupt()
    batch.out.write_text("mine")
    batch.nanoinfer.llm = None
    result = batch.run("--resume")
    assert (result.code, batch.nanoinfer.llm) == (2, None)
    assert "exists already; move it away, then resume" in result.err
    assert batch.out.read_text() == "mine"


def test_a_seed_belongs_to_its_line_and_not_to_its_place(batch: Batch) -> None:
    def seeds() -> dict[str, int | None]:
        return {prompt: sampling.seed for prompt, sampling, _ in batch.nanoinfer.llm.submitted}

    batch.run()
    first = seeds()
    batch.write(*reversed(LINES), {"id": "own", "prompt": "own", "seed": 5})
    batch.run("--overwrite", "--max-num-seqs", "2")
    second = seeds()
    assert second.pop("own") == 5
    assert first == second
    assert len(set(first.values())) == 5
    batch.run("--overwrite", "--seed", "1")
    assert not set(seeds().values()) & set(first.values())


@pytest.mark.parametrize("option", ["--events", "--cache-snapshot"])
def test_files_written_along_the_way_are_neither_input_nor_output(batch: Batch, option: str) -> None:
    before = batch.source.read_bytes()
    for path in (batch.source, batch.out):
        result = batch.run(option, str(path))
        assert (result.code, batch.nanoinfer.llm) == (2, None)
        assert "is the input or the output as well" in result.err
    assert batch.source.read_bytes() == before
