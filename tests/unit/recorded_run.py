"""A run of 74 seconds as step events, the same every time: what the tests of the display look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from nanoinfer.engine.events import FinishedSequence, RequestTiming, StepEvent
from nanoinfer.engine.info import EngineInfo
from nanoinfer.engine.latency import SLO
from nanoinfer.ui.snapshot import RequestCounts, RunSnapshot, SnapshotBuilder

STEP_S = 0.02
BLOCKS = 1000


def info(**changes: object) -> EngineInfo:
    described = EngineInfo(
        model="Qwen3-0.6B", model_reason="", architecture="Qwen3ForCausalLM", device="cpu", dtype="float32",
        attention="torch", attention_reason="", kernels="eager", tensor_parallel_size=2, block_size=16,
        num_blocks=BLOCKS, kv_bytes=1 << 30, weight_bytes=1, vocab_size=100, max_model_len=4096, max_num_seqs=64,
        max_num_batched_tokens=2048, schedule="mixed", enable_prefix_caching=True,
    )  # fmt: skip
    return replace(described, **changes)  # type: ignore[arg-type]


@cache
def events() -> tuple[StepEvent, ...]:
    return tuple(steps())


def steps() -> Iterator[StepEvent]:
    """3,700 steps in which the load rises and falls; every fifth second a request ends, one fails, one is preempted."""
    for number in range(3700):
        time = number * STEP_S
        running = 8 + (number // 250) % 7 * 4
        ended = []
        if number % 250 == 249:
            token_times = tuple(time - 2.0 + i * STEP_S * (1 + number % 3 / 10) for i in range(50))
            timing = RequestTiming(time - 2.5, time - 2.2, token_times[0], token_times[-1], time)
            reason = "error" if number == 1249 else "stop"
            ended = [FinishedSequence(f"request-{number}", 0, reason, 100, 50, 50, 0, timing, token_times)]
        # A request that ends has its first token a hundred steps before.
        began = ((f"request-{number + 100}", time - 0.5),) if number % 250 == 149 else ()
        starts = number % 25 == 0
        active = 200 + running * 10
        yield StepEvent(
            step=number, time=time, kind="mixed" if starts else "decode", running=running, waiting=12,
            prefill_tokens=(40 + number % 1000) * starts, decode_tokens=running, cached_tokens=80 * starts,
            prompt_tokens=200 * starts, blocks_active=active, blocks_cached=300, blocks_free=BLOCKS - 300 - active,
            evictions=number % 100 == 0, preemptions=number == 2000,
            emitted=tuple((f"request-{i}", 1) for i in range(running)), finished=tuple(ended), schedule_ms=0.25,
            device_ms=18.5, step_ms=20.0, first_tokens=began,
        )  # fmt: skip


def snapshot(*, slos: bool = True, warning: str | None = None, requests: RequestCounts | None = None) -> RunSnapshot:
    """The end of the run, as `bench` would show it."""
    limits = (SLO("ttft", 800.0), SLO("tpot", 22.5)) if slos else ()
    builder = SnapshotBuilder(info(), title="bench", slos=limits)
    builder.expect(256, 400.0)
    for event in events():
        builder.observe(event)
    return builder.snapshot(requests or RequestCounts(256, 123, 1), warning)
