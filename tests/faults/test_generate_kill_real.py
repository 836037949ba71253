"""kill -9 and --resume with the real model: the same greedy answers in float32 as without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from test_generate_kill import comparable, results_in

QUESTIONS = [
    "What is the capital of France?",
    "Name a colour.",
    "Count to five.",
    "What is 2 + 2?",
    "Say hello in Czech.",
]


def test_three_kills(smollm2_folder: Path, tmp_path: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": text}], "max_tokens": 6 + i} for i, text in enumerate(QUESTIONS)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out, whole, partial = (tmp_path / name for name in ("out.jsonl", "whole.jsonl", "out.jsonl.partial"))
    command = [sys.executable, "-m", "nanoinfer", "generate", str(smollm2_folder), "-f", str(tmp_path / "in.jsonl")]
    command += ["--temperature", "0", "--dtype", "float32", "--num-blocks", "64", "--max-num-seqs", "2", "-o"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, str(whole)], env=environment, check=True, capture_output=True, timeout=300)
    for kill in range(3):
        process = subprocess.Popen([*command, str(out), "--resume"], env=environment, stderr=subprocess.DEVNULL)
        while process.poll() is None and len(results_in(partial)) <= kill:
            time.sleep(0.005)
        process.kill()
        process.wait()
        assert kill < len(results_in(partial)) < len(QUESTIONS), "killed too late"
    done = subprocess.run(
        [*command, str(out), "--resume"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "from before)" in done.stderr
    assert comparable(out) == comparable(whole)
