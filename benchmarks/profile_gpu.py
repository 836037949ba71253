"""Where the device's time of decode steps goes: for each kernel, how often a step launches it and what it adds.

    python benchmarks/profile_gpu.py [--shape 0.6b|8b] [--out FILE] SEQUENCES/PROMPT/OUTPUT ...

Kernels overlap, so what one adds is the time from its predecessor's end to its own. The engine is timed without the
profiler first. One JSON line for each case, e.g. of 1/128/512.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import gpu
import torch
from machine import facts

from nanoinfer import LLM, SamplingParams

MOST = 24  # kernels that are reported


def intervals(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> dict[str, float]:
    """Median milliseconds from a decode step to the next, and of a step on the device."""
    subscription = llm.events.subscribe()
    llm.generate(prompts, params)
    steps = [event for event in subscription.drain() if event.kind == "decode"]
    llm.events.unsubscribe(subscription)
    return {
        "interval_ms": statistics.median(b.time - a.time for a, b in itertools.pairwise(steps)) * 1e3,
        "device_ms": statistics.median(step.device_ms for step in steps),
    }


def device_events(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[dict[str, Any]]:
    """Kernels and copies in the order in which they end, without the first quarter: prompts are in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        llm.generate(prompts, params)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        trace = json.loads(Path(file.name).read_text())["traceEvents"]
    device = [event for event in trace if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    device.sort(key=lambda event: event["ts"] + event["dur"])
    return device[len(device) // 4 :]


def by_kernel(events: list[dict[str, Any]], steps: float) -> list[list[Any]]:
    added: dict[str, list[float]] = defaultdict(list)
    for before, event in itertools.pairwise(events):
        end = event["ts"] + event["dur"]
        added[event["name"]].append(end - before["ts"] - before["dur"])
    largest = sorted(added.items(), key=lambda item: -sum(item[1]))[:MOST]
    return [[name[:70], round(len(us) / steps, 2), round(statistics.mean(us), 2)] for name, us in largest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="SEQUENCES/PROMPT/OUTPUT")
    parser.add_argument("--shape", choices=gpu.SHAPES, default="0.6b")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path)
    gpu.add_settings(parser)
    options = parser.parse_args()
    options.engine = gpu.engine_options(options.settings)
    bench = gpu.Bench(options)
    bench.emit(machine=facts(), shape=options.shape)
    with bench.open(max_num_seqs=256) as llm:
        for case in options.cases:
            count, prompt, output = map(int, case.split("/"))
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=output)
            for seed in range(2):  # kernels are compiled and graphs captured
                llm.generate(bench.prompts(count, prompt, seed), params)
            row = intervals(llm, bench.prompts(count, prompt, 2), params)
            events = device_events(llm, bench.prompts(count, prompt, 3), params)
            kernels = by_kernel(events, output * 3 / 4)
            bench.emit(case=case, **row, **{"kernels (name, calls a step, us added by each)": kernels})
    if options.out:
        options.out.write_text("".join(json.dumps(result) + "\n" for result in bench.results))


if __name__ == "__main__":
    main()
