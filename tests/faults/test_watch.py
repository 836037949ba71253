"""The time-out of tensor parallelism counts for steps that somebody waits for, and for no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepResult
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
