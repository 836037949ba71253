"""ParallelExecutor: the executor of rank 0, which tells the other ranks of each step before it runs its own part."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress

import torch

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError, RankError
from nanoinfer.layers.group import Group
from nanoinfer.runner.channel import STEP, encode_batch
from nanoinfer.runner.executor import FailedStep, Runner, step_error
from nanoinfer.runner.ranks import Ranks
from nanoinfer.runner.watch import Watch

ABORT_PATIENCE_S = 10.0


class ParallelExecutor:
    """Runs every step on all ranks. A failure on any of them ends them all: `submit` then only gives failed steps.

    `on_close` is called at the end. Four flags say how far an end has come; none is ever taken back.

    * `Watch.tripped`: the watch has noticed a rank, the time or a second signal. Exchanges end, with wrong results, so
      `finish` refuses what it gets. `submit` may still be first, and launches one more step, in vain.
    * `Watch._aborting`: the exchanges are being ended, once, whether the watch or `fail` has asked first.
    * `_failure`: `submit` or `finish`, whichever noticed first, has called `fail`: the error is this one from now on,
      ranks and runner are gone. Without `tripped` if the main thread noticed before the watch or the fault is its own.
    * `_closed`: nothing may be submitted.

    The watch's thread sets only the first two, `tripped` before it aborts, and leaves runner and channels alone.
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
        self._closed = False

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch `batch` on all ranks; an exception is kept for the handle's `result`."""
        if self._failure is not None:
            return FailedStep(self._failure)
        assert self._runner is not None, "closed"
        with self._watch.uninterrupted(), self._watch.waiting():
            try:
                self._ranks.send(STEP, encode_batch(batch))
                return _Step(self, self._runner.launch(batch))
            except Exception as error:
                return FailedStep(self.fail(error))

    def finish(self, handle: StepHandle) -> StepResult:
        """The result of a step; raises what really went wrong if it failed."""
        with self._watch.uninterrupted(), self._watch.waiting():  # on a GPU the wait for the other ranks is here
            try:
                result = handle.result()
                if self._watch.tripped:  # an aborted NCCL kernel ends like any other, and nobody raises
                    raise RankError("the exchanges between ranks were ended")
            except EngineError as error:
                self.fail(error)
        if self._failure is not None:
            raise self._failure from None
        return result

    def discard(self) -> None:
        """The steps under way go on, on all ranks, and nobody waits for them."""

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
            # NCCL gives its communicator up only when all graphs with it are gone. So they go now, also from the frames
            # that the error has kept.
            _forget_variables(error)
            self._runner = None
            self._watch.abort()  # steps under way wait for ranks that end now
            self._ranks.kill()
        return self._failure

    def close(self) -> None:
        """End the other ranks, drop the runner, and give back what the group holds: all of it, whatever fails.

        After a failure, which has been told, the device may refuse everything; that would only hide it.
        """
        if self._closed:
            return
        self._closed = True
        ignored = (RuntimeError, OSError) if self._has_failed else ()
        stages = (self._watch.close, self._ranks.stop, self._close_group, self._on_close, torch.cuda.empty_cache)
        with suppress(*ignored), ExitStack() as stack:
            for stage in reversed(stages):
                stack.callback(stage)

    @property
    def _has_failed(self) -> bool:
        return self._failure is not None or self._watch.tripped

    def _close_group(self) -> None:
        """After a failure without waiting for exchanges that will never end."""
        self._runner = None  # its graphs go before the group that their collectives use
        if self._has_failed:
            # A graph that somebody still holds keeps it from ending; then it ends with the process.
            aborting = self._watch.abort()
            aborting.join(ABORT_PATIENCE_S)
            if aborting.is_alive():
                return
        self._group.close()


class _Step:
    """A step under way on all ranks."""

    def __init__(self, executor: ParallelExecutor, handle: StepHandle) -> None:
        self._executor = executor
        self._handle = handle

    def result(self) -> StepResult:
        return self._executor.finish(self._handle)


def _forget_variables(error: BaseException | None) -> None:
    """Clear the frames that `error` and what led to it came through, which stay alive as long as it does."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
