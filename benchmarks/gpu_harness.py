"""Harness of the GPU kernel benchmarks: models' shapes, random weights and caches, checked and timed variants.

A variant is compared with its torch twin, captured as a CUDA graph, compared with the graph's result (a moving result
is a race), and timed by replays between events. Compilation can be spread over processes that share Triton's cache.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from machine import facts
from torch import Tensor

BF16 = torch.bfloat16
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    layers: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


QWEN3_0_6B = Model("qwen3-0.6b", 1024, 16, 8, 128, 3072, 28, 151936)
QWEN3_8B = Model("qwen3-8b", 4096, 32, 8, 128, 12288, 6, 151936)  # 6 of 36 layers are enough to leave the L2 cache
TOY = Model("toy", 64, 4, 2, 16, 96, 2, 500)


@dataclass
class Bench:
    """Runs variants: compiles its share of them (`share`), or checks and times all."""

    device: torch.device
    tiny: bool
    share: tuple[int, int] | None
    results: dict[str, Any] = field(default_factory=dict)
    seen: int = 0

    def variant(
        self,
        key: str,
        fn: Callable[[], Any],
        *,
        expected: Tensor | None = None,
        tolerance: float = 2e-2,
        **facts: Any,
    ) -> float:
        """Median microseconds of fn (inf if it failed or was wrong), recorded under key with its samples."""
        self.seen += 1
        if self.share is not None:
            if self.seen % self.share[1] == self.share[0]:
                with quiet():
                    fn()
            return 0.0
        try:
            record = self._measure(fn, expected, tolerance) | facts
        except Exception as error:
            record = {"error": f"{type(error).__name__}: {str(error)[:300]}"} | facts
            if self.tiny:
                raise
        self.results[key] = record
        median = record.get("us", float("inf"))
        extra = {k: v for k, v in record.items() if k not in ("samples_us", "us")}
        print(f"{key:60s} {median:10.1f} us  {extra}", flush=True)
        return median

    def _measure(self, fn: Callable[[], Any], expected: Tensor | None, tolerance: float) -> dict[str, Any]:
        actual = fn()
        actual = actual[0] if isinstance(actual, tuple) else actual
        record: dict[str, Any] = {}
        if expected is not None:
            difference = (actual.double() - expected.double()).norm() / expected.double().norm()
            record["error_rel"] = float(f"{difference.item():.3g}")
            assert difference.item() < tolerance, f"wrong: relative error {difference.item()}"
        if self.tiny:
            return record
        samples, replayed = graph_times(fn)
        replayed = replayed[0] if isinstance(replayed, tuple) else replayed
        if not torch.equal(actual, replayed):  # a moving result is a race
            record["graph_differs"] = int((actual != replayed).sum())
        record["us"] = sorted(samples)[len(samples) // 2]
        record["samples_us"] = [round(sample, 2) for sample in samples]
        return record

    def best(self, prefix: str) -> str:
        timed = {k: v["us"] for k, v in self.results.items() if k.startswith(prefix) and "us" in v}
        return min(timed, key=timed.__getitem__) if timed else ""


@contextmanager
def quiet() -> Iterator[None]:
    try:
        yield
    except Exception:
        traceback.print_exc()


def graph_times(fn: Callable[[], Any], replays: int = 15) -> tuple[list[float], Any]:
    """Microseconds of each replay, and what the last one wrote."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fn()
    for _ in range(3):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, stop in events:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(stop) * 1e3 for start, stop in events]
    out = [part.clone() for part in out] if isinstance(out, tuple) else out.clone()
    return times, tuple(out) if isinstance(out, list) else out


def randn(bench: Bench, *shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(*shape, dtype=BF16, device=bench.device).normal_().mul_(scale)


@dataclass
class Weights:
    """One layer's matrices, and the norms around them."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm: Tensor
    head_norm: Tensor


def make_layers(bench: Bench, model: Model) -> list[Weights]:
    def matrix(rows: int, columns: int) -> Tensor:
        return randn(bench, rows, columns, scale=columns**-0.5)

    return [
        Weights(
            qkv=matrix(model.qkv, model.hidden),
            o=matrix(model.hidden, model.heads * model.head_dim),
            gate_up=matrix(2 * model.inner, model.hidden),
            down=matrix(model.hidden, model.inner),
            norm=randn(bench, model.hidden),
            head_norm=randn(bench, model.head_dim),
        )
        for _ in range(model.layers)
    ]


class DecodeLayers:
    """Paged caches of several layers, so that together they do not fit the L2 cache."""

    def __init__(self, bench: Bench, model: Model, batch: int, context: int, block_size: int, layers: int) -> None:
        blocks = -(-context // block_size)
        self.tables = torch.randperm(batch * blocks, device=bench.device).to(torch.int32).view(batch, blocks)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=bench.device)
        positions = self.lengths.long() - 1
        last = self.tables[torch.arange(batch, device=bench.device), positions // block_size].long()
        self.slots = last * block_size + positions % block_size
        shape = (batch * blocks, block_size, model.kv_heads, model.head_dim)
        self.caches = [(randn(bench, *shape), randn(bench, *shape)) for _ in range(layers)]
        angles = torch.rand(context, model.head_dim // 2, device=bench.device) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=bench.device)


Sections = dict[str, tuple[Callable[[Bench], None], int]]  # name -> (function, limit in seconds)


class OutOfTimeError(BaseException):
    """Not an Exception, so that a variant's own error handling lets it pass."""


def run_sections(bench: Bench, sections: Sections, names: list[str], save: Callable[[], None]) -> None:
    def out_of_time(*_: Any) -> None:
        raise OutOfTimeError("the section's time is over")

    signal.signal(signal.SIGALRM, out_of_time)
    for name in names:
        section, limit = sections[name]
        began = time.perf_counter()
        signal.alarm(0 if bench.tiny or bench.share else limit)
        try:
            torch.manual_seed(0)
            section(bench)
        except (Exception, OutOfTimeError):
            traceback.print_exc()
            if bench.tiny:
                raise
        finally:
            signal.alarm(0)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        if bench.share is None:
            print(f"-- {name}: {time.perf_counter() - began:.1f} s", flush=True)
            save()


def main(description: str, sections: Sections, default_out: Path) -> None:
    """Command line of a script whose sections are given."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_out)
    parser.add_argument("--sections", default=",".join(sections))
    parser.add_argument("--processes", type=int, default=0, help="compile variants in this many processes first")
    parser.add_argument("--compile-limit", type=float, default=150.0, help="seconds for those processes")
    parser.add_argument("--share", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true", help="toy sizes, no timing; also in Triton's interpreter")
    arguments = parser.parse_args()
    share = tuple(int(part) for part in arguments.share.split("/")) if arguments.share else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(device, arguments.tiny, share)  # type: ignore[arg-type]

    machine = facts() | {"triton": triton.__version__}

    def save() -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine, "results": bench.results}, indent=1))

    if arguments.processes:
        compile_first(arguments)
    run_sections(bench, sections, arguments.sections.split(","), save)


def compile_first(arguments: argparse.Namespace) -> None:
    """Run every variant once, each process its share, so that the timed run finds all kernels compiled."""
    began = time.perf_counter()
    command = [sys.executable, sys.argv[0], "--sections", arguments.sections]
    workers = [
        subprocess.Popen([*command, "--share", f"{i}/{arguments.processes}"]) for i in range(arguments.processes)
    ]
    for worker in workers:
        try:
            worker.wait(max(1.0, began + arguments.compile_limit - time.perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"-- compiled in {time.perf_counter() - began:.1f} s", flush=True)
