"""Tensor parallelism on several GPUs of one host: the same answers, the same workloads, and what an all-reduce costs.

    python benchmarks/tensor_parallel_gpu.py [--parts allreduce,agree,decode,prefill,bench256] [--shapes 0.6b,8b]
        [--tp 1,2] [--repeat 2] [--limit 90] [--out FILE] [--set NAME=VALUE ...]

Workloads are those of gpu.py; here one engine for each shape and number of ranks serves them all. Every result is one
JSON line, and FILE is written again after each. A part that takes longer than its limit is interrupted as by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu
import torch
from machine import facts

from nanoinfer import SamplingParams

PARTS = ("allreduce", "agree", "decode", "prefill", "bench256")
AGREE_TOKENS = 32
GRACE_S = 45  # after a limit, before the process gives up
IN_A_GRAPH = 50  # all-reduces
SIZES = [1 << i for i in range(11, 27)]  # bytes: 2 KiB to 64 MiB


class Bench(gpu.Bench):
    """Results carry the shape and the number of ranks, and are saved at once."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.labels: dict[str, Any] = {}

    def emit(self, **result: Any) -> None:
        super().emit(**(self.labels | result))
        self.save()

    def save(self) -> None:
        if self.options.out:
            self.options.out.write_text(json.dumps(self.results, indent=1) + "\n")

    def part(self, name: str, function: Callable[[], None]) -> None:
        """Run one part within the limit; whatever happens in it, the others follow."""
        began = time.perf_counter()
        interrupt = threading.Timer(self.options.limit, os.kill, (os.getpid(), signal.SIGINT))
        give_up = threading.Timer(self.options.limit + GRACE_S, self._give_up, (name,))
        for timer in (interrupt, give_up):
            timer.daemon = True
            timer.start()
        try:
            function()
        except KeyboardInterrupt:
            self.emit(part=name, error=f"interrupted after {time.perf_counter() - began:.0f} s")
        except Exception:
            self.emit(part=name, error=traceback.format_exc()[-2500:])
        finally:
            interrupt.cancel()
            give_up.cancel()
        print(f"# {self.labels} {name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)

    def _give_up(self, name: str) -> None:
        self.emit(part=name, error="hung, and could not be interrupted")
        os._exit(3)

    # -- parts -----------------------------------------------------------------------------------------------------

    def agree(self) -> None:
        """Greedy tokens and logprobs of several ranks against those of one, in bfloat16."""
        prompts = [*self.prompts(5, 300, seed=9), *self.prompts(8, 17, seed=8)]
        runs = {}
        for tp in self.options.tp:
            with self.open(num_blocks=2000, tensor_parallel_size=tp) as llm:
                report = SamplingParams(temperature=0.0, max_tokens=AGREE_TOKENS, ignore_eos=True, logprobs=0)
                plain = SamplingParams(temperature=0.0, max_tokens=AGREE_TOKENS, ignore_eos=True)
                outputs = [output.outputs[0] for output in llm.generate(prompts, report)]
                fused = [output.outputs[0].token_ids for output in llm.generate(prompts, plain)]
            runs[tp] = outputs
            same = sum(a == b.token_ids for a, b in zip(fused, outputs, strict=True))
            self.emit(part="agree", tp=tp, what="fused sampling equals sampling from logits", equal=same,
                      of=len(prompts))  # fmt: skip
        first = self.options.tp[0]
        for tp, outputs in runs.items():
            pairs = list(zip(runs[first], outputs, strict=True))
            equal = sum(a == b for x, y in pairs for a, b in zip(x.token_ids, y.token_ids, strict=True))
            # How far both continue the same text; beyond that they cannot be compared.
            common = [
                next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=True)) if a != b), AGREE_TOKENS)
                for x, y in pairs
            ]
            distances = [
                abs(a.logprob - b.logprob)
                for (x, y), n in zip(pairs, common, strict=True)
                for a, b in list(zip(x.logprobs or [], y.logprobs or [], strict=True))[:n]
            ]
            self.emit(part="agree", tp=tp, what=f"against tp {first}", equal=equal, of=AGREE_TOKENS * len(prompts),
                      common=common, largest_logprob_difference=max(distances, default=None))  # fmt: skip

    def workloads(self, parts: list[str]) -> None:
        """One engine for all; its start and its end are no part's."""
        try:
            self._workloads(parts)
        except Exception:
            self.emit(part="engine", error=traceback.format_exc()[-2500:])

    def _workloads(self, parts: list[str]) -> None:
        began = time.perf_counter()
        with self.open(max_num_seqs=256, max_num_batched_tokens=16_384, tensor_parallel_size=self.labels["tp"]) as llm:
            self.emit(
                part="engine",
                start_s=time.perf_counter() - began,
                weight_bytes=llm.info.weight_bytes,
                kv_bytes=llm.info.kv_bytes,
            )
            rows = {
                "decode": lambda: self.decode_rows(llm),
                "prefill": lambda: self.prefill_rows(llm, ((8, 4000),)),
                "bench256": lambda: self.bench256_rows(llm),
            }
            for name in parts:
                self.part(name, rows[name])

    def allreduce(self) -> None:
        for size in self.options.tp:
            if size > 1:
                for row in measure_all_reduce(size, self.options.engine.get("device", "cuda"), self.options.limit):
                    self.emit(part="allreduce", tp=size, **row)


# -- all-reduce ------------------------------------------------------------------------------------------------------


def measure_all_reduce(ranks: int, device: str, limit_s: float) -> list[dict[str, Any]]:
    """Rows of all sizes: microseconds of one operation on each rank, in a process for each."""
    from nanoinfer.models.partition import Partition
    from nanoinfer.runner.process_group import open_store

    store = open_store(Partition(0, ranks), None, limit_s)
    command = [sys.executable, __file__, "--all-reduce", device, str(ranks), store.host, str(store.port)]
    processes = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    try:
        deadline = time.monotonic() + limit_s - 5
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"a rank failed:\n{errors[-1500:]}")
    by_rank = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in outputs]
    return [
        {**{name: rows[0][name] for name in ("what", "via", "bytes")}, "us": max(row["us"] for row in rows),
         "us_by_rank": [row["us"] for row in rows], "is_right": all(row["is_right"] for row in rows)}
        for rows in zip(*by_rank, strict=True)
    ]  # fmt: skip


def all_reduce_rank(kind: str, ranks: int, host: str, port: int, rank: int) -> None:
    """One rank of `measure_all_reduce`: prints a JSON line for each operation and size, through NCCL (or gloo) alone
    and as the engine does it."""
    from nanoinfer.models.partition import Partition
    from nanoinfer.runner.process_group import DistributedGroup, join_ranks, open_store

    partition, device = Partition(rank, ranks), torch.device(kind)
    if kind == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = open_store(partition, (host, port), 60)
    library = DistributedGroup(store_of("library", store), partition, device, ranks_on_host=ranks, timeout_s=60)
    engine = join_ranks(store_of("engine", store), partition, device, ranks_on_host=ranks, timeout_s=60)
    groups = {"library": library, "engine": engine}
    if kind == "cuda":
        from nanoinfer.runner.peer_group import with_peer_memory

        for lines in (4, 8, 16):
            groups[f"peers, {lines} lines"] = with_peer_memory(library, device, piece=1 << 26, lines=lines)
    for via, group in groups.items():
        _sweep(group, device, via)


def store_of(name: str, store: Any) -> Any:
    """A part of the store, so that two groups do not read each other's keys."""
    from torch.distributed import PrefixStore

    return PrefixStore(name, store)


@torch.inference_mode()
def _sweep(group: Any, device: torch.device, via: str) -> None:
    ranks, rank = group.size, group.rank
    total = ranks * (ranks + 1) // 2
    for size in SIZES if device.type == "cuda" else SIZES[:4]:
        pattern = (torch.arange(size // 2, device=device) % 13).to(torch.bfloat16)
        summed = group.all_reduce(pattern * (rank + 1))
        is_right = torch.equal(summed, pattern * total)
        buffer = torch.zeros_like(pattern)
        us = _microseconds(lambda x: group.all_reduce(x), buffer, 20 if size < 1 << 22 else 5)
        print(json.dumps({"what": "all_reduce", "via": via, "bytes": size, "us": us, "is_right": is_right}), flush=True)
    for batch in (1, 32, 256):  # what sampling exchanges
        pairs = torch.full((2, batch), rank, dtype=torch.int32, device=device)
        gathered = group.all_gather(pairs)
        is_right = gathered[:, 0, 0].tolist() == list(range(ranks))
        us = _microseconds(lambda x: group.all_gather(x)[0], pairs, 20)
        print(
            json.dumps({"what": "all_gather", "via": via, "bytes": 8 * batch, "us": us, "is_right": is_right}),
            flush=True,
        )


def _microseconds(operation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, replays: int) -> float:
    """Median of one operation in a chain of them, in a CUDA graph if there is one."""

    def chain() -> torch.Tensor:
        y = x
        for _ in range(IN_A_GRAPH):
            y = operation(y)
        return y

    if x.device.type != "cuda":
        began = time.perf_counter()
        chain()
        return (time.perf_counter() - began) / IN_A_GRAPH * 1e6
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    samples = []
    for i in range(replays + 2):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        if i >= 2:
            samples.append(began.elapsed_time(ended) / IN_A_GRAPH * 1e3)
    return statistics.median(samples)


def main() -> None:
    if sys.argv[1:2] == ["--all-reduce"]:
        kind, ranks, host, port, rank = sys.argv[2:]
        all_reduce_rank(kind, int(ranks), host, int(port), int(rank))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shapes", default="0.6b,8b")
    parser.add_argument("--tp", default="1,2", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--limit", type=float, default=90, help="seconds for a part")
    parser.add_argument("--out", type=Path)
    gpu.add_settings(parser)
    options = parser.parse_args()
    options.engine = gpu.engine_options(options.settings)
    parts = options.parts.split(",")
    assert set(parts) <= set(PARTS), parts
    shapes = options.shapes.split(",")
    options.shape = shapes[0]
    bench = Bench(options)
    bench.emit(part="machine", **facts())
    if "allreduce" in parts:
        bench.part("allreduce", bench.allreduce)
    if "agree" in parts:
        bench.labels = {"shape": shapes[0]}
        bench.part("agree", bench.agree)
    for shape in shapes:
        bench.folder = gpu.model_folder(shape)
        for tp in options.tp:
            bench.labels = {"shape": shape, "tp": tp}
            if wanted := [part for part in parts if part in ("decode", "prefill", "bench256")]:
                bench.workloads(wanted)
    bench.save()


if __name__ == "__main__":
    main()
