"""Executors: where steps run. LocalExecutor runs them in this process."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError
from nanoinfer.runner.model_runner import ModelRunner


@dataclass(frozen=True)
class FailedStep:
    """A StepHandle of a step that raised; `result` raises in its place."""

    error: Exception

    def result(self) -> StepResult:
        raise EngineError(f"a step failed on the device: {type(self.error).__name__}: {self.error}") from self.error


class LocalExecutor:
    """Runs each step at once, in the caller's thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Run `batch`; an exception is kept for the handle's `result`, so that callers have one place to catch it."""
        try:
            return CompletedStep(self._runner.run(batch))
        except Exception as error:
            return FailedStep(error)

    def close(self) -> None:
        """Nothing to release: the pool goes with the runner."""
