"""Executors: where steps run. LocalExecutor runs them in this process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError


class Runner(Protocol):
    """Launches steps in order: ModelRunner waits for each, OverlappedRunner does not."""

    def launch(self, batch: ScheduledBatch) -> StepHandle: ...


def step_error(error: Exception) -> EngineError:
    """What a step's `result` raises in place of torch's own exceptions."""
    return EngineError(f"a step failed on the device: {type(error).__name__}: {error}")


@dataclass(frozen=True)
class FailedStep:
    """A StepHandle of a step that raised; `result` raises in its place."""

    error: Exception

    def result(self) -> StepResult:
        if isinstance(self.error, EngineError):
            raise self.error
        raise step_error(self.error) from self.error


class LocalExecutor:
    """Launches each step at once, from the caller's thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner | None = runner

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch `batch`; an exception is kept for the handle's `result`: callers have one place to catch it."""
        assert self._runner is not None, "closed"
        try:
            return self._runner.launch(batch)
        except Exception as error:
            return FailedStep(error)

    def discard(self) -> None:
        """Nothing waits for a handle here."""

    def close(self) -> None:
        """Drop the runner, and with it weights, pool and graphs; on CUDA their memory goes back to the device."""
        self._runner = None
        with suppress(RuntimeError):  # a device that has failed refuses; the step has told why
            torch.cuda.empty_cache()  # nothing where CUDA was not used
