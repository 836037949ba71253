"""Peak memory of a run on a CPU: weights once + the KV blocks in use + what torch itself takes.

    python benchmarks/memory_cpu.py [--dtype float32] [--json FILE]

Each figure is the process's own peak (VmHWM) in MiB, of a fresh process: torch imported and a small product computed,
then a whole run of the built-in model over 8 prompts of 200 tokens with 64 tokens of output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from machine import facts

PEAK = """
def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
"""

TORCH = (
    PEAK
    + """
import torch
a = torch.randn(512, 512); (a @ a).sum()
print(peak())
"""
)

RUN = (
    PEAK
    + """
import sys, json
from nanoinfer import LLM, SamplingParams
with LLM("smollm2", device="cpu", dtype=sys.argv[1], num_blocks=int(sys.argv[2])) as llm:
    loaded = peak()
    prompts = [[i + j for j in range(200)] for i in range(0, 8000, 1000)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    print(json.dumps({"loaded": loaded, "peak": peak(), "weights": llm.info.weight_bytes / 2**20,
                      "kv_pool": llm.info.kv_bytes / 2**20}))
"""
)


def run(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--num-blocks", default="160")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch_alone = float(run(TORCH))
    measured = json.loads(run(RUN, options.dtype, options.num_blocks))
    rest = measured["peak"] - torch_alone - measured["weights"] - measured["kv_pool"]
    result = {
        "machine": facts(),
        "unit": "MiB",
        "dtype": options.dtype,
        "torch_alone": torch_alone,
        **measured,
        "rest": rest,
        "rest_over_weights": rest / measured["weights"],
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
