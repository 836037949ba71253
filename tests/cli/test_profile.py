"""--profile DIR: which steps are traced, where the file is, and what is said."""

from __future__ import annotations

from pathlib import Path

from program import Program


def test_generate_traces_steps_after_the_first(nanoinfer: Program, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    result = nanoinfer("generate", "-p", "a long prompt of words, to be answered", "--profile", folder)
    assert result.code == 0
    (file,) = folder.iterdir()
    assert file.name.startswith("generate-")
    assert file.name.endswith(".json.gz")
    assert f"trace of {file.read_text()} steps, which it slowed down: {file}; open it with" in result.err
    (trace,) = nanoinfer.llm.traces
    assert (trace.skip, trace.count, trace.closed) == (4, 32, True)


def test_a_run_too_short_for_a_trace_says_so(nanoinfer: Program, tmp_path: Path) -> None:
    result = nanoinfer("generate", "-p", "x", "--profile", tmp_path / "t")
    assert (result.code, result.out) == (0, "X\n")
    assert "warning: no trace: the run ended within its first 6 steps; give it more to do." in result.err
    assert list((tmp_path / "t").iterdir()) == []


def test_bench_traces_its_first_measured_run_alone(nanoinfer: Program, tmp_path: Path) -> None:
    words = ("bench", "--num-prompts", "2", "--input-len", "8", "--output-len", "8", "--repeat", "2", "--warmup", "1")
    result = nanoinfer(*words, "--profile", tmp_path)
    assert result.code == 0
    (trace,) = nanoinfer.llm.traces
    (file,) = tmp_path.iterdir()
    assert (trace.path, trace.skip, trace.steps) == (file, 0, 8)
    assert f"trace of 7 steps, which it slowed down: {file}" in result.err


def test_a_sweep_has_a_trace_of_each_level(nanoinfer: Program, tmp_path: Path) -> None:
    words = ("bench", "--num-prompts", "2", "--input-len", "8", "--output-len", "8", "--sweep", "1,2")
    assert nanoinfer(*words, "--profile", tmp_path).code == 0
    assert len(nanoinfer.llm.traces) == len(list(tmp_path.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_refused_before_the_load(nanoinfer: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for command in (("generate", "-p", "x"), ("bench",)):
        result = nanoinfer(*command, "--profile", tmp_path / "file")
        assert (result.code, nanoinfer.llm) == (2, None)
        assert f"cannot write in {tmp_path / 'file'}: File exists; choose another folder for --profile." in result.err
