"""Executors: where steps run. LocalExecutor runs them in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError


class Runner(Protocol):
    """Launches steps in order: ModelRunner waits for each, OverlappedRunner does not."""

    def launch(self, batch: ScheduledBatch) -> StepHandle: ...


@dataclass(frozen=True)
class FailedStep:
    """A StepHandle of a step that raised; `result` raises in its place."""

    error: Exception

    def result(self) -> StepResult:
        raise EngineError(f"a step failed on the device: {type(self.error).__name__}: {self.error}") from self.error


class LocalExecutor:
    """Launches each step at once, from the caller's thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch `batch`; an exception is kept for the handle's `result`: callers have one place to catch it."""
        try:
            return self._runner.launch(batch)
        except Exception as error:
            return FailedStep(error)

    def close(self) -> None:
        """Nothing to release: the pool goes with the runner."""
