"""Cost of the control plane: scheduling 256 decoding sequences, and prefix hits against misses in a large pool.

    python benchmarks/scheduler.py [--json FILE]

Steady decode: schedule() + postprocess() of 256 sequences, median over steps, the device left out. Prefix cache: cost
of match_prefix() + allocate() per block in a pool of 50,000 blocks, for prompts that all hit and prompts that all miss.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

from machine import facts

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import StepResult
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.scheduler import Scheduler
from nanoinfer.engine.sequence import Sequence


def make_sequence(order: int, prompt: list[int], max_new: int) -> Sequence:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new, ignore_eos=True)
    return Sequence(
        str(order),
        0,
        prompt,
        sampling,
        arrival_order=order,
        arrival_time=0.0,
        max_len=len(prompt) + max_new,
        stop_token_ids=frozenset(),
    )


def steady_decode(num_seqs: int = 256, prompt_len: int = 512, steps: int = 400) -> dict[str, float]:
    rng = random.Random(0)
    blocks = BlockManager(50_000, 16)
    scheduler = Scheduler(blocks, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs * prompt_len)
    for i in range(num_seqs):
        scheduler.add(make_sequence(i, [rng.randrange(10_000) for _ in range(prompt_len)], steps + 10))
    schedule_ms, postprocess_ms = [], []
    for number in range(steps):
        t0 = time.perf_counter()
        step = scheduler.schedule(t0)
        t1 = time.perf_counter()
        result = StepResult([number % 9_000] * sum(step.is_sampled))
        t2 = time.perf_counter()
        scheduler.postprocess(step, result, t2)
        t3 = time.perf_counter()
        if number >= 20:
            schedule_ms.append((t1 - t0) * 1e3)
            postprocess_ms.append((t3 - t2) * 1e3)
    return {
        "sequences": num_seqs,
        "schedule_ms_median": statistics.median(schedule_ms),
        "schedule_ms_p99": sorted(schedule_ms)[int(len(schedule_ms) * 0.99)],
        "postprocess_ms_median": statistics.median(postprocess_ms),
        "both_ms_median": statistics.median(a + b for a, b in zip(schedule_ms, postprocess_ms, strict=True)),
    }


def prefix_cost(num_blocks: int, prompts: int = 40, blocks_each: int = 256, rounds: int = 5) -> dict[str, float]:
    """Microseconds per block to match and allocate a prompt, when nothing hits and when everything hits."""
    rng = random.Random(1)
    block_size = 16
    manager = BlockManager(num_blocks, block_size)
    # Fill the pool with cached blocks first, so that a linear scan of any list would show.
    for i in range(num_blocks // 1000):
        filler = make_sequence(i, [rng.randrange(10_000) for _ in range(1000 * block_size)], 1)
        manager.allocate(filler, manager.match_prefix(filler))
        manager.publish(filler, filler.prompt_len)
        manager.free(filler)
    cost: dict[str, list[float]] = {"miss": [], "hit": []}
    for _ in range(rounds):
        texts = [[rng.randrange(10_000) for _ in range(blocks_each * block_size + 1)] for _ in range(prompts)]
        for kind in ("miss", "hit"):
            sequences = [make_sequence(i, text, 1) for i, text in enumerate(texts)]
            started = time.perf_counter()
            for seq in sequences:
                manager.allocate(seq, manager.match_prefix(seq))
                manager.publish(seq, seq.prompt_len)
                manager.free(seq)
            cost[kind].append((time.perf_counter() - started) / (prompts * blocks_each) * 1e6)
            assert all(seq.num_cached_tokens == 0 for seq in sequences)
    assert manager.check_integrity([]) == []
    return {f"{kind}_us_per_block": statistics.median(values) for kind, values in cost.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = {
        "machine": facts(),
        "steady_decode": steady_decode(),
        "prefix_cache": {str(n): prefix_cost(n) for n in (12_000, 50_000)},
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
