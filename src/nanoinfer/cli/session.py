"""What a command works with besides its options: the console, the signals, and the way to an engine."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from nanoinfer.cli.interrupts import Interrupts
from nanoinfer.cli.options import DisplayOptions
from nanoinfer.config import EngineConfig
from nanoinfer.loading import Notify
from nanoinfer.ui.console import Console, in_ascii, takes_unicode
from nanoinfer.ui.loading import LoadingDisplay
from nanoinfer.ui.text import byte_size, plural

if TYPE_CHECKING:
    from nanoinfer.cli.length_check import PromptLimits
    from nanoinfer.engine.info import EngineInfo
    from nanoinfer.llm import LLM


def open_llm(config: EngineConfig, notify: Notify) -> LLM:
    """Start the engine. Everything slow, torch above all, is imported here and not before."""
    from nanoinfer.llm import LLM
    from nanoinfer.runner.torchrun import Launch

    if (launch := Launch.from_environment()) is not None:
        launch.check(config.tensor_parallel_size)  # the others serve as ranks already
    return LLM(config, notify=notify)


def find_limits(config: EngineConfig) -> PromptLimits | None:
    """The model's context and tokenizer, read without loading it."""
    from nanoinfer.cli import length_check

    return length_check.find_limits(config)


@contextmanager
def _garbage_collector_off() -> Iterator[None]:
    """For imports and the load, which leave no garbage: looking for it would take a tenth of their time. What is there
    at the end stays out of every later search, which spares the engine's steps long pauses."""
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@dataclass(frozen=True)
class Services:
    """What tests replace: how an engine is started, how prompts are counted, the clock (seconds, monotonic), and the
    words of the command line after the program's name."""

    open_llm: Callable[[EngineConfig, Notify], Any] = open_llm
    find_limits: Callable[[EngineConfig], PromptLimits | None] = find_limits
    clock: Callable[[], float] = time.perf_counter
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    """One run of a command."""

    display: DisplayOptions
    console: Console
    interrupts: Interrupts
    services: Services = field(default_factory=Services)

    def announce(self, what: str) -> None:
        """Called before a command's own imports, which take longer than a person should look at nothing. Whatever the
        console writes next replaces it; what is printed by another way needs `console.clear_status` first."""
        self.console.status(f"{what} ...")

    def show(self, report: str) -> None:
        """Print a command's result; in ASCII where that was asked for or standard output takes nothing else."""
        self.console.clear_status()
        print(report if takes_unicode(sys.stdout) and not self.console.ascii else in_ascii(report))

    def show_json(self, document: object) -> None:
        """Print a command's result as JSON, with escapes for what standard output does not take."""
        self.console.clear_status()
        escaped = self.console.ascii or not takes_unicode(sys.stdout)
        print(json.dumps(document, ensure_ascii=escaped, indent=2))

    @contextmanager
    def llm(self, config: EngineConfig) -> Iterator[LLM]:
        """An engine that is closed at the end, with its start-up shown."""
        started = self.services.clock()
        loading = LoadingDisplay(self.console, self.services.clock)
        loading.write(f"starting {config.model or 'the default model'} ...")
        with _garbage_collector_off():
            llm = self.services.open_llm(config, loading.notify)
        try:
            self.console.clear_status()
            self._introduce(llm.info, config, self.services.clock() - started)
            yield llm
        finally:
            llm.close()

    def _introduce(self, info: EngineInfo, config: EngineConfig, seconds: float) -> None:
        """Which model runs where, and what was decided with the reason; under -v everything that is known."""
        self.console.say(info.model_reason)
        tp = f" · tp {info.tensor_parallel_size}" if info.tensor_parallel_size > 1 else ""
        self.console.dim(f"{info.device} {info.dtype}{tp} · ready in {seconds:.1f} s")
        self.console.dim(f"attention {info.attention} ({info.attention_reason}) · kernels {info.kernels}")
        why = "asked for" if config.block_size else f"best with {info.attention} attention"
        self.console.dim(
            f"{plural(info.num_blocks, 'KV block')} of {plural(info.block_size, 'token')} ({why}), "
            f"{byte_size(info.kv_bytes)} · context {plural(info.max_model_len, 'token')}"
        )
        for warning in info.warnings:
            self.console.warn(warning)
        if self.display.verbose:
            for name, value in asdict(info).items():
                self.console.dim(f"  {name} {value}")
