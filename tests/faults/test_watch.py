"""The time-out of tensor parallelism counts while somebody waits for a step; what signals do then; how it all ends."""

from __future__ import annotations

import _signal
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from nanoinfer.config import EngineConfig
from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepResult
from nanoinfer.errors import EngineError, MemoryBudgetError
from nanoinfer.layers.group import Group
from nanoinfer.runner import parallel
from nanoinfer.runner import watch as watch_module
from nanoinfer.runner.executor import LocalExecutor
from nanoinfer.runner.parallel_executor import ParallelExecutor
from nanoinfer.runner.watch import SIGNALS, Watch

TIMEOUT_S = 60.0
PATIENCE_S = 100.0  # for what comes at once, on however busy a machine


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


class Clock:
    """What the watch takes for the time; it moves only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.looks = 0  # how often the watch's own thread has looked at it

    def monotonic(self) -> float:
        now = self.now
        if threading.current_thread().name == "nanoinfer-watch":
            self.looks += 1
        return now

    def pass_time(self, seconds: float) -> None:
        """Return when the watch has acted on it, if it does: one look may have begun before, the next one sees it, and
        with the one after that it is done."""
        self.now += seconds
        seen = self.looks
        until(lambda: self.looks >= seen + 3)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch_module, "time", clock)
    monkeypatch.setattr(watch_module, "LOOK_MS", 1)
    return clock


@pytest.fixture
def group() -> WatchedGroup:
    return WatchedGroup()


@pytest.fixture
def executor(group: WatchedGroup) -> Iterator[ParallelExecutor]:
    executor = ParallelExecutor(Runner(), group, SilentRanks(), TIMEOUT_S, lambda: None)  # type: ignore[arg-type]
    yield executor
    executor.close()


class Waiting:
    """A step that ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def result(self) -> StepResult:
        self.begun.set()
        assert self.end.wait(PATIENCE_S)
        return StepResult([])


@pytest.mark.parametrize("where", ["submit", "finish"])
def test_a_step_that_does_not_end_is_aborted(group: WatchedGroup, clock: Clock, where: str) -> None:
    """On a CPU a step runs in `submit`."""
    waiting = Waiting()

    class WaitingRunner:
        def launch(self, batch: ScheduledBatch) -> Waiting:
            if where == "submit":
                waiting.result()
            return waiting

    executor = ParallelExecutor(WaitingRunner(), group, SilentRanks(), TIMEOUT_S, lambda: None)  # type: ignore[arg-type]
    caller = threading.Thread(target=lambda: suppressed(lambda: executor.submit(step(0)).result()))
    caller.start()
    assert waiting.begun.wait(PATIENCE_S)
    clock.pass_time(TIMEOUT_S - 1)
    assert not executor._watch.tripped
    clock.pass_time(2)
    assert executor._watch.tripped
    until(lambda: group.aborted)
    waiting.end.set()
    caller.join()
    executor.close()


def suppressed(function: Callable[[], object]) -> None:
    with suppress(EngineError):
        function()


def test_a_caller_may_pause(executor: ParallelExecutor, clock: Clock) -> None:
    """With overlap a step is under way between two calls; a chat's user who thought for long once lost the engine."""
    executor.submit(step(0)).result()
    pending = executor.submit(step(1))
    clock.pass_time(2 * TIMEOUT_S)
    pending.result()
    assert not executor._watch.tripped


def test_a_step_whose_result_nobody_fetched_is_over_with_a_later_one(executor: ParallelExecutor, clock: Clock) -> None:
    """Its time once ran on for ever, and an idle engine was aborted."""
    executor.submit(step(0))
    executor.submit(step(1)).result()
    clock.pass_time(2 * TIMEOUT_S)
    assert not executor._watch.tripped


def test_discarded_steps_are_not_waited_for(executor: ParallelExecutor, clock: Clock) -> None:
    """After an interruption an engine may be idle for as long as a person thinks."""
    executor.submit(step(0))
    executor.discard()
    clock.pass_time(2 * TIMEOUT_S)
    assert not executor._watch.tripped


def test_what_an_aborted_step_returns_is_no_result(group: WatchedGroup, clock: Clock) -> None:
    """A kernel that waited for another GPU ends like any other when it is aborted."""
    aborted = threading.Event()

    class Waiting:
        def result(self) -> StepResult:
            clock.now += 2 * TIMEOUT_S
            assert aborted.wait(PATIENCE_S)
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
    executor.close()
    assert order == ["aborted", "closed"]
    assert caught.value is not None  # it is still held


# -- signals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch(group: WatchedGroup) -> Iterator[Watch]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    ended = SilentRanks()
    ended.end_processes = lambda: None  # type: ignore[attr-defined]
    watch = Watch(ended, 60, group.abort)  # type: ignore[arg-type]
    yield watch
    watch.close()
    for signum, handler in zip(SIGNALS, before, strict=True):
        signal.signal(signum, handler)


def test_only_signals_that_end_a_step_are_counted(watch: Watch, clock: Clock) -> None:
    """A timer's or a child's end was taken for a second Ctrl-C, and ended the engine."""
    before = signal.signal(signal.SIGALRM, lambda signum, frame: None)
    try:
        with watch.uninterrupted():
            for _ in range(3):
                signal.raise_signal(signal.SIGALRM)
            clock.pass_time(0)
        assert not watch.tripped
    finally:
        signal.signal(signal.SIGALRM, before)


def test_signals_are_delivered_once_and_after_the_step(watch: Watch, group: WatchedGroup) -> None:
    heard: list[int] = []
    for signum in SIGNALS:
        signal.signal(signum, lambda signum, frame: heard.append(signum))
    with watch.uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert heard == []
        until(lambda: watch.tripped)
    assert heard == [signal.SIGTERM, signal.SIGINT]
    with watch.uninterrupted():
        pass
    assert heard == [signal.SIGTERM, signal.SIGINT]
    until(lambda: group.aborted)


def test_an_error_in_a_step_swallows_no_signal(watch: Watch) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def fail() -> None:
        with watch.uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt):
        fail()
    with watch.uninterrupted():
        pass  # the same Ctrl-C does not come again


@pytest.mark.parametrize("when", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_handlers_are_given_back(watch: Watch, monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """SIGTERM had no effect from then on, and signals went to the watch for good."""

    def raising(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    for signum in SIGNALS:
        signal.signal(signum, raising)
    set_handler, calls = _signal.signal, []

    def interrupted(signum: int, handler: Any) -> Any:
        before = set_handler(signum, handler)
        if handler is raising and signum == when and not calls:
            calls.append(signum)
            signal.raise_signal(signum)
        return before

    with monkeypatch.context() as patched:
        patched.setattr(_signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), watch.uninterrupted():
            pass
    assert calls == [when]
    assert [signal.getsignal(signum) for signum in SIGNALS] == [raising] * len(SIGNALS)
    assert signal.set_wakeup_fd(-1) == -1


def test_two_signals_that_a_deaf_thread_hears_as_one_are_two(watch: Watch) -> None:
    """The first asks a program to stop, the second ends the step: it must then know that it was asked twice."""
    heard: list[int] = []
    signal.signal(signal.SIGINT, lambda signum, frame: heard.append(signum))

    with watch.uninterrupted():
        watch._signals_end.send(bytes([signal.SIGINT] * 2))  # as the system's handler does
        until(lambda: watch.tripped)
    assert heard == [signal.SIGINT] * 2


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# -- the end ---------------------------------------------------------------------------------------------------------


def test_all_is_closed_after_a_failure_and_its_error_stays() -> None:
    """After an error of the device everything that asks it anything raises."""
    order = []

    def refuse(what: str) -> Callable[[], None]:
        def call() -> None:
            order.append(what)
            raise RuntimeError(f"CUDA error in {what}")

        return call

    class FailingRunner:
        def launch(self, batch: ScheduledBatch) -> CompletedStep:
            raise RuntimeError("CUDA error in the step")

    group = WatchedGroup()
    group.close = refuse("group")  # type: ignore[method-assign]
    ranks = SilentRanks()
    ranks.stop = refuse("ranks")  # type: ignore[method-assign]
    executor = ParallelExecutor(FailingRunner(), group, ranks, 60, refuse("threads"))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="in the step"):
        executor.submit(step(0)).result()
    executor.close()
    assert order == ["ranks", "group", "threads"]


def test_an_error_of_the_end_itself_is_told(executor: ParallelExecutor, group: WatchedGroup) -> None:
    closed = []

    def refuse() -> None:
        raise RuntimeError("at the end")

    group.close = refuse  # type: ignore[method-assign]
    executor._on_close = lambda: closed.append(True)
    with pytest.raises(RuntimeError, match="at the end"):
        executor.close()
    assert closed


def test_a_start_that_fails_gives_everything_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A caller who took MemoryBudgetError and tried again with less found the memory of the first attempt taken."""
    order: list[str] = []

    class Ranks(SilentRanks):
        def wait_for(self, stage: str) -> None: ...

        def tell(self, message: Callable[[int], dict[str, Any]]) -> None: ...

        def watching(self, function: Callable[[], Group]) -> Group:
            return function()

        def on_loss(self, function: Callable[[], None]) -> nullcontext[None]:
            return nullcontext()

        def kill(self) -> None:
            order.append("kill")

    group = WatchedGroup()

    def abort() -> None:
        order.append("abort")
        raise RuntimeError("CUDA error")

    def close() -> None:
        order.append("close")
        raise OSError("CUDA error")

    def build(*arguments: Any, **options: Any) -> None:
        raise MemoryBudgetError("too large")

    group.abort, group.close = abort, close  # type: ignore[method-assign]
    monkeypatch.setattr(parallel, "join_ranks", lambda *arguments, **options: group)
    monkeypatch.setattr(parallel, "build_data_plane", build)
    threads, config = torch.get_num_threads(), EngineConfig.from_options({"tensor_parallel_size": 2})
    with pytest.raises(MemoryBudgetError, match="too large"):
        parallel.build_parallel(
            config,
            None,
            torch.device("cpu"),
            Ranks(),
            folder=tmp_path,
            load=lambda slots: None,  # type: ignore[arg-type]
        )
    assert order == ["abort", "kill", "close"]
    assert torch.get_num_threads() == threads


def test_an_executor_closes_on_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    LocalExecutor(Runner()).close()


def test_the_group_of_peers_closes_all_it_has_on_a_device_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoinfer.runner.peer_memory import PeerMemory

    order: list[str] = []

    def refuse(*arguments: object) -> None:
        raise RuntimeError("CUDA error")

    class Driver:
        def __getattr__(self, name: str) -> Callable[..., int]:
            return lambda *arguments: order.append(name) or 700  # type: ignore[func-returns-value]

    memory = PeerMemory.__new__(PeerMemory)
    memory._driver, memory._device, memory._group = Driver(), None, Group()  # type: ignore[assignment]
    memory._opened, memory._own = [1, 2], 3
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    pytest.importorskip("triton")
    from nanoinfer.runner.peer_group import PeerGroup

    peers = PeerGroup.__new__(PeerGroup)
    peers._device, peers._memory, peers._inner = None, memory, Group()  # type: ignore[assignment]
    peers.abort = lambda: order.append("abort")  # type: ignore[method-assign]
    peers._inner.close = lambda: order.append("inner")  # type: ignore[method-assign]
    with pytest.raises((RuntimeError, OSError)):
        peers.close()
    assert order == ["abort", "cuIpcCloseMemHandle", "cuIpcCloseMemHandle", "cuMemFree_v2", "inner"]
