"""The time-out of tensor parallelism counts for steps that somebody waits for, and for no others."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepResult
from nanoinfer.errors import EngineError
from nanoinfer.layers.group import Group
from nanoinfer.runner.parallel_executor import ParallelExecutor

TIMEOUT_S = 0.2
LOOK_S = 1.5  # the watch looks once a second


class SilentRanks:
    """Ranks that take everything and have nothing to tell."""

    def streams(self) -> list[Any]:
        return []

    def send(self, kind: int, payload: bytes) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...

    def explain(self, error: Exception | None) -> EngineError:
        return EngineError(f"explained: {error}")


class WatchedGroup(Group):
    aborted = False

    def abort(self) -> None:
        self.aborted = True


class Runner:
    def launch(self, batch: ScheduledBatch) -> CompletedStep:
        return CompletedStep(StepResult([]))


def step(number: int) -> ScheduledBatch:
    return ScheduledBatch(number, [], [], [], [], [], [], 0)


@pytest.fixture
def group() -> WatchedGroup:
    return WatchedGroup()


@pytest.fixture
def executor(group: WatchedGroup) -> Iterator[ParallelExecutor]:
    executor = ParallelExecutor(Runner(), group, SilentRanks(), TIMEOUT_S, lambda: None)  # type: ignore[arg-type]
    yield executor
    executor.close()


def test_a_step_that_does_not_end_is_aborted(executor: ParallelExecutor, group: WatchedGroup) -> None:
    executor.submit(step(0)).result()
    executor.submit(step(1))
    time.sleep(LOOK_S)
    assert group.aborted


def test_a_step_whose_result_nobody_fetched_is_over_with_a_later_one(
    executor: ParallelExecutor, group: WatchedGroup
) -> None:
    """Its time once ran on for ever, and an idle engine was aborted."""
    executor.submit(step(0))
    executor.submit(step(1)).result()
    time.sleep(LOOK_S)
    assert not group.aborted


def test_discarded_steps_are_not_waited_for(executor: ParallelExecutor, group: WatchedGroup) -> None:
    """After an interruption an engine may be idle for as long as a person thinks."""
    executor.submit(step(0))
    executor.discard()
    time.sleep(LOOK_S)
    assert not group.aborted


def test_what_an_aborted_step_returns_is_no_result(group: WatchedGroup) -> None:
    """A kernel that waited for another GPU ends like any other when it is aborted."""
    aborted = threading.Event()

    class Waiting:
        def result(self) -> StepResult:
            assert aborted.wait(10)
            return StepResult([])

    class WaitingRunner:
        def launch(self, batch: ScheduledBatch) -> Waiting:
            return Waiting()

    group.abort = aborted.set  # type: ignore[method-assign]
    executor = ParallelExecutor(WaitingRunner(), group, SilentRanks(), TIMEOUT_S, lambda: None)  # type: ignore[arg-type]
    handle = executor.submit(step(0))
    with pytest.raises(EngineError, match="explained"):
        handle.result()
    with pytest.raises(EngineError, match="explained"):
        executor.submit(step(1)).result()
    executor.close()


def test_an_abort_that_waits_for_the_graphs_to_go_ends(group: WatchedGroup) -> None:
    """NCCL's does, and an exception kept the runner alive, and its graphs with it."""

    class FailingRunner:
        def launch(self, batch: ScheduledBatch) -> CompletedStep:
            raise ValueError("a bug")

    runner = FailingRunner()
    alive, order = weakref.ref(runner), []

    def abort() -> None:
        while alive() is not None:
            time.sleep(0.01)
        order.append("aborted")

    group.abort = abort  # type: ignore[method-assign]
    group.close = lambda: order.append("closed")  # type: ignore[method-assign]
    executor = ParallelExecutor(runner, group, SilentRanks(), 60, lambda: None)  # type: ignore[arg-type]
    del runner
    with pytest.raises(EngineError, match="a bug") as caught:
        executor.submit(step(0)).result()
    began = time.monotonic()
    executor.close()
    assert time.monotonic() - began < 5
    assert order == ["aborted", "closed"]
    assert caught.value is not None  # it is still held
