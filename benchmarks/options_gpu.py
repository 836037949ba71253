"""The engine's options side by side on one GPU: decode, prefill, and bench256 where that takes seconds.

    python benchmarks/options_gpu.py [--only NAME,...] [--shape 0.6b|8b] [--out FILE]

One JSON line for each choice, written as soon as it is there. Workloads as in gpu.py, with fewer output tokens.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from pathlib import Path
from typing import Any

import gpu
from machine import facts

from nanoinfer import LLM, SamplingParams

TOKENS = 64  # of a sequence, beyond the first
CHOICES: dict[str, dict[str, Any]] = {
    "default": {},
    "schedule prefill-first": {"schedule": "prefill-first"},
    "default again": {},
    "attention flash-attn": {"attention": "flash-attn"},
    "enforce-eager": {"enforce_eager": True},
    "kernels eager": {"kernels": "eager"},
    "kernels compiled": {"kernels": "compiled"},
    "attention torch": {"attention": "torch"},
}
WITH_BENCH256 = ("default", "schedule prefill-first", "default again", "attention flash-attn")


class Bench(gpu.Bench):
    def row(self, options: dict[str, Any], *, bench256: bool) -> dict[str, Any]:
        one, many = (SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in (1, TOKENS + 1))
        began = time.perf_counter()
        with self.open(max_num_seqs=256, **options) as llm:
            self.best(llm, 1, 8, one, 1)
            row = {"start_to_first_token_s": time.perf_counter() - began}
            for count in (1, 32):
                first, all_of_them = self.best(llm, count, 128, one), self.best(llm, count, 128, many)
                row[f"ttft {count}/128 ms"] = first * 1e3
                row[f"decode {count}/128 TPOT ms"] = (all_of_them - first) / TOKENS * 1e3
            row["prefill 4x2000 tok/s"] = 8000 / self.best(llm, 4, 2000, one)
            if bench256:
                self.bench256_rows(llm)
                row["bench256 tok/s"] = self.results[-1]["median"]
        return row

    def best(self, llm: LLM, count: int, length: int, params: SamplingParams, runs: int = 4) -> float:
        """Seconds of the fastest of several runs, of which the first ones compile and capture."""
        seconds = []
        for seed in range(runs):
            llm.reset_prefix_cache()
            seconds.append(self.seconds(llm, self.prompts(count, length, seed), params))
        return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CHOICES))
    parser.add_argument("--shape", choices=gpu.SHAPES, default="0.6b")
    parser.add_argument("--repeat", type=int, default=1, help="runs of bench256 after the one that warms up")
    parser.add_argument("--out", type=Path)
    gpu.add_settings(parser)
    options = parser.parse_args()
    options.engine = gpu.engine_options(options.settings)
    bench = Bench(options)
    rows: list[dict[str, Any]] = [{"machine": facts()}]
    for name in options.only.split(","):
        try:
            row = bench.row(CHOICES[name], bench256=name in WITH_BENCH256)
        except Exception:  # one that cannot run here must not lose the others
            row = {"error": traceback.format_exc()[-600:]}
        rows.append({"choice": name} | row)
        print(json.dumps(rows[-1]), flush=True)
        if options.out:
            options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
