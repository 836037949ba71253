"""Every command ends with the code of what happened to it, whatever it was doing."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM, die_at
from program import Program

from nanoinfer.errors import EngineError, MemoryBudgetError, ModelError

BENCH = ("bench", "--device", "cpu", "--num-prompts", "4", "--input-len", "8", "--output-len", "9", "--warmup", "0")
# What each command is given, and what it reads from standard input.
WORK: dict[str, tuple[tuple[str, ...], str]] = {
    "generate": (("generate",), '{"prompt": "hello hello"}\n'),
    "generate -p": (("generate", "-p", "hello hello"), ""),
    "generate -o": (("generate", "-o", "{tmp}/out"), '{"prompt": "hello hello"}\n'),
    "chat": (("chat",), "hello hello\n"),
    "chat -p": (("chat", "-p", "hello hello"), ""),
    "bench": (BENCH, ""),
    "bench --repeat": ((*BENCH, "--repeat", "2"), ""),
    "bench --sweep": ((*BENCH, "--sweep", "1,2"), ""),
    "inspect-cache": (("inspect-cache", "-f", "-"), '{"prompt": "hello hello"}\n'),
}

every_command = pytest.mark.parametrize("name", WORK)


@pytest.fixture
def run(nanoinfer: Program, tmp_path: Path) -> Callable[..., Any]:
    def call(name: str, *more: str) -> Any:
        arguments, stdin = WORK[name]
        return nanoinfer(*(word.format(tmp=tmp_path) for word in arguments), *more, stdin=stdin)

    return call


@every_command
def test_what_goes_well_ends_with_0(run: Callable[..., Any], name: str) -> None:
    assert run(name).code == 0


@every_command
@pytest.mark.parametrize("error", [EngineError("the device went away."), ZeroDivisionError("division by zero")])
def test_an_engine_that_fails_ends_with_1(
    nanoinfer: Program, run: Callable[..., Any], name: str, error: Exception
) -> None:
    nanoinfer.make = lambda config: FakeLLM(config, before_step=die_at(3, error))
    result = run(name)
    assert result.code == 1
    assert str(error).rstrip(".") in result.err
    assert "Traceback" not in result.err
    assert nanoinfer.llm.closed


@every_command
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineError("a rank died."), 1),
        (ModelError("the weights are not there."), 2),
        (MemoryBudgetError("the weights do not fit."), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_a_start_that_fails_ends_with_the_code_of_the_reason(
    nanoinfer: Program, run: Callable[..., Any], name: str, error: BaseException, code: int
) -> None:
    def refuse(config: Any) -> Any:
        raise error

    nanoinfer.make = refuse
    result = run(name)
    assert (result.code, result.out) == (code, "")
    assert f"error: {error}" in result.err or not str(error)
    assert "Traceback" not in result.err


@every_command
@pytest.mark.parametrize(
    "more", [("--no-such-option",), ("--max-num-seqs", "0"), ("--max-num-seqs", "x"), ("-q", "-v"), ("a", "b")]
)
def test_wrong_usage_ends_with_2(nanoinfer: Program, run: Callable[..., Any], name: str, more: tuple[str, ...]) -> None:
    result = run(name, *more)
    assert (result.code, result.out, nanoinfer.llm) == (2, "", None)
    assert result.err


@every_command
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_every_command_with_its_code(
    nanoinfer: Program, run: Callable[..., Any], name: str, signum: int, code: int
) -> None:
    def before_step(step: int) -> None:
        if step == 3:
            signal.raise_signal(signum)

    nanoinfer.make = lambda config: FakeLLM(config, before_step=before_step)
    result = run(name)
    assert result.code == code
    assert "Traceback" not in result.err
    assert nanoinfer.llm.closed


class Losing(FakeLLM):
    """Ends a request of the benchmark as a failure would."""

    def step(self) -> Any:
        deltas = super().step()
        self.abort("bench-3")
        return deltas


@pytest.mark.parametrize("more", [(), ("--repeat", "2"), ("--format", "csv"), ("--sweep", "4")])
def test_a_benchmark_with_a_failed_request_ends_with_3(nanoinfer: Program, more: tuple[str, ...]) -> None:
    nanoinfer.make = Losing
    assert nanoinfer(*BENCH, *more).code == 3


def test_a_missed_gate_counts_more_than_a_failed_request(nanoinfer: Program) -> None:
    nanoinfer.make = Losing
    limits = ("--goodput", "ttft:60000", "--slo-attainment")
    assert nanoinfer(*BENCH, *limits, "0.9").code == 4
    assert nanoinfer(*BENCH, *limits, "0.7").code == 3, "three of four kept the limits"


@pytest.mark.parametrize("bad", ['{"prompt": ""}', "{oops", '{"prompt": "' + "z" * 3000 + '"}'])
def test_a_report_of_the_cache_that_leaves_a_line_out_ends_with_3(nanoinfer: Program, bad: str) -> None:
    result = nanoinfer("inspect-cache", "-f", "-", stdin=f'{{"prompt": "hello"}}\n{bad}\n')
    assert result.code == 3
    assert "integrity   ok" in result.out
