"""How long a command takes from the start of its process on a CPU: medians over several runs, in turn.

    python benchmarks/start_cpu.py [--runs 7] [--json FILE]

first token: `generate` with the built-in model, which is in the cache, until the first byte of the answer; the others
until their end. The kernels are compiled and every file is read once before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import facts

TARGETS_S = {"first token": 5.0, "--help": 0.3, "generate --help": 0.5, "bad option": 1.0, "no valid line": 1.0}


def commands(folder: Path) -> dict[str, list[str]]:
    bad = folder / "bad.jsonl"
    bad.write_text("no JSON\n" * 3)
    return {
        "first token": ["generate", "-m", "smollm2", "-p", "Say hello.", "--max-tokens", "1"],
        "--help": ["--help"],
        "generate --help": ["generate", "--help"],
        "bad option": ["generate", "--no-such-option"],
        "no valid line": ["generate", "-m", "smollm2", "-f", str(bad)],
    }


def seconds(arguments: list[str], *, first_byte: bool) -> float:
    """From the start of the process to its first byte on standard output, or to its end."""
    program = Path(sys.executable).with_name("nanoinfer")
    started = time.perf_counter()
    with subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        if first_byte:
            process.stdout.read(1)
            elapsed = time.perf_counter() - started
        process.stdout.read()
    return elapsed if first_byte else time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in range(options.runs + 1):
            for name, arguments in commands(Path(folder)).items():
                elapsed = seconds(arguments, first_byte=name == "first token")
                if run:
                    times.setdefault(name, []).append(round(elapsed, 3))
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} s (target {TARGETS_S[name]}; {min(values)} to {max(values)})")
    if options.json:
        result = {"machine": facts(), "load": os.getloadavg(), "seconds": times}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
