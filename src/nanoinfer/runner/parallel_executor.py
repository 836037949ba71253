"""ParallelExecutor: the executor of rank 0, which tells the other ranks of each step before it runs its own part."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.errors import EngineError, RankError
from nanoinfer.layers.group import Group
from nanoinfer.runner.channel import STEP, encode_batch
from nanoinfer.runner.executor import FailedStep, Runner, step_error
from nanoinfer.runner.ranks import Ranks


class ParallelExecutor:
    """Runs every step on all ranks. A failure on any of them ends them all: `submit` then only gives failed steps.

    `on_close` is called at the end.
    """

    def __init__(self, runner: Runner, group: Group, ranks: Ranks, on_close: Callable[[], None]) -> None:
        self._runner: Runner | None = runner
        self._group = group
        self._ranks = ranks
        self._on_close = on_close
        self._failure: EngineError | None = None

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        """Launch `batch` on all ranks; an exception is kept for the handle's `result`."""
        assert self._runner is not None, "closed"
        if self._failure is not None:
            return FailedStep(self._failure)
        with uninterrupted():
            try:
                self._ranks.send(STEP, encode_batch(batch))
                return _Step(self, self._runner.launch(batch))
            except Exception as error:
                return FailedStep(self.fail(error))
            except BaseException as error:  # the second Ctrl-C: no rank knows how far the others are
                self.fail(EngineError(f"a step was cut off by {type(error).__name__}; make a new LLM."))
                raise

    def fail(self, error: Exception) -> EngineError:
        """End the other ranks, and return what to raise from now on."""
        if self._failure is None:
            if isinstance(error, RankError | OSError):
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
            self._ranks.stop()
            self._runner = None
            self._group.close()
            self._on_close()
            torch.cuda.empty_cache()  # nothing where CUDA was not used


class _Step:
    """A step on its way on all ranks; `result` raises what really went wrong if it fails."""

    def __init__(self, executor: ParallelExecutor, handle: StepHandle) -> None:
        self._executor = executor
        self._handle = handle

    def result(self) -> StepResult:
        try:
            return self._handle.result()
        except EngineError as error:
            raise self._executor.fail(error) from None


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back the first SIGINT and the first SIGTERM until the end; a second one gets through at once.

    A rank that leaves a step in its middle would leave the others waiting in it. Only the main thread hears signals.
    """
    handlers: dict[int, Any] = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    held: list[tuple[int, FrameType | None]] = []

    def hold(signum: int, frame: FrameType | None) -> Any:
        held.append((signum, frame))
        handler = handlers[signum]
        if len(held) > 1 and callable(handler):
            handler(signum, frame)

    replaced = {}
    if threading.current_thread() is threading.main_thread():
        replaced = {signum: handler for signum, handler in handlers.items() if callable(handler)}
    for signum in replaced:
        signal.signal(signum, hold)
    try:
        yield
    finally:
        for signum, handler in replaced.items():
            signal.signal(signum, handler)
    for signum, frame in held[:1]:
        replaced[signum](signum, frame)
