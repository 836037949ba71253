"""nanoinfer against transformers' generate on a CPU with the built-in model: interleaved pairs, median of the ratios.

    python benchmarks/cpu_speed.py [--dtype float32,bfloat16] [--pairs 3] [--parts decode1,...] [--json FILE]

decode1: one sequence, 64 new tokens, time of those after the first. batch16, ragged16: 16 requests of 32 (or 4 to
64) prompt tokens, 32 new tokens each, whole call; transformers pads them to one batch. prefill: 1,024 tokens, one new.
prefix: 16 prompts with 512 tokens in common and 32 of their own, arriving together, with and without the prefix cache.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from machine import facts
from transformers import AutoModelForCausalLM

from nanoinfer import LLM, SamplingParams
from nanoinfer.loading.builtin import smollm2_folder


def tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(100, 40_000) for _ in range(count)]


class Pair:
    """The same work by both, timed in turn."""

    def __init__(self, dtype: str) -> None:
        folder = smollm2_folder()
        self.theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.ours = LLM(str(folder), device="cpu", dtype=dtype, max_num_seqs=16, num_blocks=800)

    @torch.inference_mode()
    def their_seconds(self, prompts: list[list[int]], new: int) -> float:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        started = time.perf_counter()
        self.theirs.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return time.perf_counter() - started

    def our_seconds(self, prompts: list[list[int]], new: int) -> float:
        self.ours.reset_prefix_cache()
        started = time.perf_counter()
        self.ours.generate(prompts, SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True))
        return time.perf_counter() - started

    def compare(self, lengths: list[int], new: int, pairs: int, *, minus_first: bool = False) -> dict[str, Any]:
        """Tokens per second of both, and the ratio of their times, pair by pair."""
        rng = random.Random(0)
        work = len(lengths) * (new - minus_first) if new > 1 else sum(lengths)
        samples = []
        for _ in range(pairs + 1):
            prompts = [tokens(n, rng) for n in lengths]
            times = []
            for seconds in (self.their_seconds, self.our_seconds):
                first = seconds(prompts, 1) if minus_first else 0.0
                times.append(seconds(prompts, new) - first)
            samples.append(times)
        ratios = [theirs / ours for theirs, ours in samples[1:]]
        return {
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "transformers_tok_s": work / statistics.median(t for t, _ in samples[1:]),
            "nanoinfer_tok_s": work / statistics.median(o for _, o in samples[1:]),
        }


def prefix_sharing() -> dict[str, Any]:
    """Prefill work and summed TTFT without the prefix cache over those with it."""
    rng = random.Random(1)
    common = tokens(512, rng)
    prompts = [common + tokens(32, rng) for _ in range(16)]
    measured = {}
    for caching in (True, False):
        with LLM(str(smollm2_folder()), device="cpu", num_blocks=800, enable_prefix_caching=caching) as llm:
            llm.generate([tokens(20, rng)], SamplingParams(max_tokens=2))
            subscription = llm.events.subscribe()
            outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
            work = sum(event.prefill_tokens for event in subscription.drain())
            ttft = sum((o.timing.first_token or 0.0) - o.timing.arrival for o in outputs)
            measured[caching] = (work, ttft)
    return {
        "prefill_tokens": {"with": measured[True][0], "without": measured[False][0]},
        "summed_ttft_s": {"with": measured[True][1], "without": measured[False][1]},
        "work_ratio": measured[False][0] / measured[True][0],
        "ttft_ratio": measured[False][1] / measured[True][1],
    }


def report(result: dict[str, Any], name: str, path: Path | None) -> None:
    """Print what was measured last and write all so far: a run that is ended early keeps its figures."""
    print(name, json.dumps(result[name]), flush=True)
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32,bfloat16")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--parts", default="decode1,batch16,ragged16,prefill,prefix")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    result: dict[str, Any] = {"machine": facts(), "threads": torch.get_num_threads()}
    for dtype in options.dtype.split(","):
        pair = Pair(dtype)
        cases = {
            "decode1": lambda pair=pair: pair.compare([32], 64, options.pairs, minus_first=True),
            "batch16": lambda pair=pair: pair.compare([32] * 16, 32, options.pairs),
            "ragged16": lambda pair=pair: pair.compare([4 * (i + 1) for i in range(16)], 32, options.pairs),
            "prefill": lambda pair=pair: pair.compare([1024], 1, options.pairs),
        }
        for name, case in cases.items():
            if name in parts:
                result[f"{dtype} {name}"] = case()
                report(result, f"{dtype} {name}", options.json)
        pair.ours.close()
    if "prefix" in parts:
        result["prefix"] = prefix_sharing()
        report(result, "prefix", options.json)


if __name__ == "__main__":
    main()
