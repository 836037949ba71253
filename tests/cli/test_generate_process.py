"""`nanoinfer generate` as a process: signals, a second run, full disks, pipes, and names of standard output."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAKE_MAIN = Path(__file__).parent / "fake_main.py"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt": "b"}\n')
    return path


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process with the stand-in engine, and ends what the test has left running."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str | Path, settings: tuple[str, ...] = (), **options: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(FAKE_MAIN), *settings, "--", "generate", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen(command, text=True, **{**pipes, **options})  # type: ignore[call-overload]
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def wait_for_result(partial: Path) -> None:
    """Until the partial file has its header and one result."""
    waiting = threading.Event()
    for _ in range(3000):
        if partial.exists() and partial.read_bytes().count(b"\n") > 1:
            return
        waiting.wait(0.01)
    raise AssertionError("no result came")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_does_no_harm(prompts: Path, tmp_path: Path, closed: str) -> None:
    """There were tracebacks, and the next file that was opened got what was meant for the stream."""
    for arguments in (["-f", prompts, "-o", tmp_path / "out"], ["-p", "a"]):
        command = [sys.executable, FAKE_MAIN, "--", "generate", *arguments]
        process = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *map(str, command)], capture_output=True)
        assert (process.returncode, process.stderr.count(b"error")) == (0, 0)
    assert [json.loads(line)["text"] for line in (tmp_path / "out").read_text().splitlines()] == ["A", "B"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGHUP, 129), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_results_and_says_how_to_go_on(
    start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path, signum: int, code: int
) -> None:
    process = start("-f", prompts, "-o", tmp_path / "out", settings=("endless",))
    wait_for_result(tmp_path / "out.partial")
    process.send_signal(signum)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert "1 of 2 results are in" in err
    assert err.rstrip().endswith("--resume")


def test_a_hangup_is_ignored_under_nohup(
    start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path
) -> None:
    def ignore() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = start(
        "-f", prompts, "-o", tmp_path / "out", "--max-tokens", "50", settings=("endless",), preexec_fn=ignore
    )
    wait_for_result(tmp_path / "out.partial")
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_second_run_to_the_same_output_is_told_so_and_a_dead_one_is_no_obstacle(
    start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path
) -> None:
    first = start("-f", prompts, "-o", tmp_path / "out", settings=("endless",))
    wait_for_result(tmp_path / "out.partial")
    before = (tmp_path / "out.partial").stat().st_ino
    second = start("-f", prompts, "-o", tmp_path / "out", "--overwrite")
    _, err = second.communicate(timeout=30)
    assert second.returncode == 2
    assert "another run is writing" in err
    assert "wait until it has ended, or choose another output." in err
    assert (tmp_path / "out.partial").stat().st_ino == before
    first.kill()
    first.communicate()
    third = start("-f", prompts, "-o", tmp_path / "out", "--resume", "--max-tokens", "512")
    _, err = third.communicate(timeout=30)
    assert third.returncode == 0, err
    assert "1 result kept" in err


def test_a_disk_that_fills_up_costs_nothing_that_was_done(
    start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path
) -> None:
    """A limit on the size of a file stands for the full disk: the kernel takes a part of the record, then refuses."""
    prompts.write_text("".join(f'{{"prompt": "{"x" * 100}", "id": {i}}}\n' for i in range(30)))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))

    process = start("-f", prompts, "-o", tmp_path / "out", "--max-num-seqs", "2", preexec_fn=limit)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    [error] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert "cannot write" in error
    assert "File too large" in error
    partial = (tmp_path / "out.partial").read_bytes()
    assert partial.endswith(b"}\n"), "the torn record is cut off again"
    done = partial.count(b"\n") - 1
    assert 3 < done < 30
    assert f"{done} of 30 results are in" in err
    assert "--resume" in err
    resumed = start("-f", prompts, "-o", tmp_path / "out", "--resume", "--max-num-seqs", "2")
    _, err = resumed.communicate(timeout=30)
    assert resumed.returncode == 0, err
    assert f"30 answers ({done} from before)" in err
    assert [json.loads(line)["id"] for line in (tmp_path / "out").read_text().splitlines()] == list(range(30))


def test_a_stream_that_is_full_is_one_sentence(start: Callable[..., subprocess.Popen[str]], prompts: Path) -> None:
    with open("/dev/full", "wb") as full:
        for output, options in ((("-o", "/dev/full"), {}), ((), {"stdout": full})):
            process = start("-f", prompts, *output, **options)
            err = process.communicate(timeout=30)[1]
            assert process.returncode == 1, err
            assert "No space left on device" in err
            assert "unexpected" not in err
            assert "Traceback" not in err
            assert "Exception ignored" not in err


@pytest.mark.parametrize("unbuffered", [{}, {"PYTHONUNBUFFERED": "1"}])
@pytest.mark.parametrize("arguments", [["--help"], ["inspect-cache", "--plan", "--memory", "80GiB", "--json"]])
def test_a_report_that_cannot_be_written_is_one_sentence(arguments: list[str], unbuffered: dict[str, str]) -> None:
    command, environment = [sys.executable, "-m", "nanoinfer", *arguments], os.environ | unbuffered
    with open("/dev/full", "wb") as full:
        process = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    assert process.returncode == 1
    assert process.stderr.startswith(b"error: cannot write standard output: No space left on device")
    assert process.stderr.count(b"\n") == 1


def test_a_reader_who_has_seen_enough_of_a_report_gets_no_message() -> None:
    command = [sys.executable, "-m", "nanoinfer", "inspect-cache", "--plan", "--memory", "80GiB"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=30)[1] == b""
    assert process.returncode == 128 + 13


def test_names_of_standard_output(start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path) -> None:
    piped = start("-f", prompts, "-o", "/dev/stdout")
    assert len(piped.communicate(timeout=30)[0].splitlines()) == 2
    with (tmp_path / "redirected").open("wb") as file:
        process = start("-f", prompts, "-o", "/dev/stdout", stdout=file)
        process.communicate(timeout=30)
    assert len((tmp_path / "redirected").read_text().splitlines()) == 2
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "redirected"]


def test_a_named_pipe_waits_for_its_reader(
    start: Callable[..., subprocess.Popen[str]], prompts: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    process = start("-f", prompts, "-o", tmp_path / "pipe")
    assert process.stderr is not None
    for line in process.stderr:
        if "waiting for a reader of" in line:
            break
    assert len((tmp_path / "pipe").read_text().splitlines()) == 2
    process.communicate(timeout=30)
    assert process.returncode == 0


def test_a_reader_that_leaves_ends_the_run(start: Callable[..., subprocess.Popen[str]], prompts: Path) -> None:
    process = start("-f", prompts, "--order", "completion", "--max-tokens", "30", settings=("endless",))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    assert process.wait(30) == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err
