"""Cost of the live display: its thread's own processor time, and runs with and without it in pairs.

    python benchmarks/display.py [--json FILE] [--seconds 8] [--pairs 6]

The model is a stand-in that computes for about 2 ms a step (numpy products, which release the interpreter as torch's
do); scheduler, events, metrics, snapshots and frames are the real ones, and so is the pseudo-terminal, which is read at
its other end.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from machine import facts

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import CompletedStep, ScheduledBatch, StepHandle, StepResult
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.info import EngineInfo
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.ui.console import Console
from nanoinfer.ui.run_display import RunDisplay
from nanoinfer.ui.snapshot import RequestCounts, SnapshotBuilder

STEP_S = 0.002
BLOCKS, BLOCK_SIZE = 4096, 16


class BusyExecutor:
    """Uses STEP_S of processor time, then gives every row the next token of a fixed text."""

    def __init__(self) -> None:
        self._matrix = np.random.default_rng(0).random((96, 96), dtype=np.float32)

    def submit(self, batch: ScheduledBatch) -> StepHandle:
        end = time.thread_time() + STEP_S
        while time.thread_time() < end:  # not the wall clock: on a busy machine a step must not become lighter
            self._matrix @ self._matrix
        return CompletedStep(StepResult([batch.step % 1000] * sum(batch.is_sampled), None, STEP_S * 1e3))

    def discard(self) -> None: ...

    def close(self) -> None: ...


def information(sequences: int) -> EngineInfo:
    return EngineInfo(
        model="stand-in", model_reason="", architecture="", device="cpu", dtype="float32", attention="torch",
        attention_reason="", kernels="eager", tensor_parallel_size=1, block_size=BLOCK_SIZE, num_blocks=BLOCKS,
        kv_bytes=1 << 30, weight_bytes=1, vocab_size=1000, max_model_len=4096, max_num_seqs=sequences,
        max_num_batched_tokens=8192, schedule="mixed", enable_prefix_caching=True,
    )  # fmt: skip


def make_engine(sequences: int) -> LLMEngine:
    scheduler = Scheduler(BlockManager(BLOCKS, BLOCK_SIZE), max_num_seqs=sequences, max_num_batched_tokens=8192)
    return LLMEngine(
        scheduler, BusyExecutor(), make_detokenizer=None, vocab_size=1000, eos_token_ids=frozenset(), max_model_len=4096
    )


def run(ui: str, sequences: int, seconds: float, terminal: Console) -> dict[str, float]:
    """Steps with `sequences` running all the time; a request that ends is followed by the next."""
    engine, rng = make_engine(sequences), np.random.default_rng(1)
    builder = SnapshotBuilder(information(sequences), title="benchmark", clock=time.perf_counter)
    builder.expect(1_000_000, 200.0)
    sent = done = 0
    display = RunDisplay(
        terminal,
        ui,  # type: ignore[arg-type]
        builder,
        time.perf_counter,
        lambda: RequestCounts(1_000_000, done),
        engine.events,
    )
    started, cpu, steps = time.perf_counter(), time.process_time(), 0
    with display:
        while time.perf_counter() - started < seconds:
            while sent - done < 2 * sequences:
                prompt = [7] * 64 + rng.integers(0, 1000, 64).tolist()
                sampling = SamplingParams(temperature=0.0, max_tokens=int(rng.integers(100, 300)))
                engine.add_request(str(sent), prompt, sampling)
                sent += 1
            done += sum(delta.output is not None for delta in engine.step())
            steps += 1
            display.tick()
        elapsed, used = time.perf_counter() - started, time.process_time() - cpu
    thread = display.thread
    return {
        "steps_per_s": steps / elapsed,
        "requests_per_s": done / elapsed,
        "process_cpu_s": used,
        "display_cpu_s": thread.cpu_seconds if thread else 0.0,
        "display_frames_per_s": thread.frames / elapsed if thread else 0.0,
    }


def on_terminal(work: Callable[[Console], dict[str, object]]) -> dict[str, object]:
    """Call `work` with a console on a pseudo-terminal whose other end is read by a thread."""
    reader, writer = pty.openpty()
    os.environ["TERM"] = "xterm-256color"
    os.environ.pop("NO_COLOR", None)

    def drain() -> None:
        try:
            while os.read(reader, 65536):
                pass
        except OSError:
            pass

    threading.Thread(target=drain, daemon=True).start()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        return work(Console(stream))


def measure(sequences: int, seconds: float, pairs: int, terminal: Console) -> dict[str, object]:
    run("live", sequences, 1.0, terminal)
    ratios, shares, frames, costs = [], [], [], []
    for number in range(pairs):
        order = ("live", "none") if number % 2 else ("none", "live")
        result = {ui: run(ui, sequences, seconds, terminal) for ui in order}
        live = result["live"]
        ratios.append(live["steps_per_s"] / result["none"]["steps_per_s"])
        shares.append(live["display_cpu_s"] / live["process_cpu_s"])
        frames.append(live["display_frames_per_s"])
        costs.append(live["display_cpu_s"] * 1e3 / (live["display_frames_per_s"] * seconds))
    return {
        "running": sequences,
        "steps_per_s": round(live["steps_per_s"], 1),
        "requests_per_s": round(live["requests_per_s"], 1),
        "display_share_of_cpu_percent": [round(100 * share, 3) for share in shares],
        "worst_share_percent": round(100 * max(shares), 3),
        "frames_per_s": round(statistics.median(frames), 2),
        "cpu_ms_per_frame_with_its_events": round(statistics.median(costs), 2),
        "speed_with_display_over_without": [round(ratio, 4) for ratio in ratios],
        "median_speed_ratio": round(statistics.median(ratios), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    loads = [
        on_terminal(lambda terminal, n=sequences: measure(n, options.seconds, options.pairs, terminal))  # type: ignore[misc]
        for sequences in (8, 64)
    ]
    result = {"machine": facts(), "step_ms": STEP_S * 1e3, "loads": loads}
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
