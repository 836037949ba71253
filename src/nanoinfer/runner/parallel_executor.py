"""ParallelExecutor: the executor of rank 0, which tells the other ranks of each step before it runs its own part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError, RankError
from nanoinfer.layers.group import Group
from nanoinfer.runner.channel import STEP, encode_batch
from nanoinfer.runner.executor import FailedStep, Runner, step_error
from nanoinfer.runner.ranks import Ranks
from nanoinfer.runner.watch import Watch


class ParallelExecutor:
    """Runs every step on all ranks. A failure on any of them ends them all: `submit` then only gives failed steps.

    `on_close` is called at the end.
    """

    def __init__(
        self, runner: Runner, group: Group, ranks: Ranks, timeout_s: float, on_close: Callable[[], None]
    ) -> None:
        self._runner: Runner | None = runner
        self._group = group
        self._ranks = ranks
        self._watch = Watch(ranks, timeout_s, group.abort)
        self._on_close = on_close
        self._failure: EngineError | None = None

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch `batch` on all ranks; an exception is kept for the handle's `result`."""
        assert self._runner is not None, "closed"
        if self._failure is not None:
            return FailedStep(self._failure)
        with self._watch.uninterrupted():
            try:
                self._watch.begin(batch.step)
                self._ranks.send(STEP, encode_batch(batch))
                return _Step(self, batch.step, self._runner.launch(batch))
            except Exception as error:
                return FailedStep(self.fail(error))

    def finish(self, step: int, handle: StepHandle) -> StepResult:
        """The result of step number `step`; raises what really went wrong if it failed."""
        try:
            result = handle.result()
        except EngineError as error:
            raise self.fail(error) from None
        if self._watch.tripped:  # collectives that were aborted on a GPU end without an error, and without a result
            raise self.fail(RankError("a step was given up"))
        self._watch.end(step)
        return result

    def discard(self) -> None:
        """The steps under way go on, on all ranks, but are no longer expected to end within the time-out."""
        self._watch.discard()

    def fail(self, error: Exception) -> EngineError:
        """End the other ranks, and return what to raise from now on."""
        if self._failure is None:
            if self._watch.tripped or isinstance(error, RankError | OSError):
                explained = self._ranks.explain(error)
                self._failure = explained if isinstance(explained, EngineError) else EngineError(str(explained))
            else:
                self._failure = error if isinstance(error, EngineError) else step_error(error)
            if self._failure is not error:
                self._failure.__cause__ = error
            self._ranks.kill()
        return self._failure

    def close(self) -> None:
        """End the other ranks and drop the runner; its graphs go before the group that their collectives use."""
        if self._runner is not None:
            self._watch.close()
            self._ranks.stop()
            self._runner = None
            self._group.close()
            self._on_close()
            torch.cuda.empty_cache()  # nothing where CUDA was not used


class _Step:
    """A step under way on all ranks."""

    def __init__(self, executor: ParallelExecutor, step: int, handle: StepHandle) -> None:
        self._executor = executor
        self._step = step
        self._handle = handle

    def result(self) -> StepResult:
        return self._executor.finish(self._step, self._handle)
