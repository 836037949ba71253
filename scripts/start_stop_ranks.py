"""Start and stop a tensor-parallel engine many times and tell what is left: python start_stop_ranks.py [N] [TP].

With a tiny random model, on a CPU. Exit code 1 if a process, a file in /dev/shm or a descriptor is left.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from nanoinfer import LLM, SamplingParams

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def left_behind() -> dict[str, object]:
    return {
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "shared memory": sorted(os.listdir("/dev/shm")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def main(count: int, tp: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        answers, after_first, began = set(), None, time.perf_counter()
        for number in range(count):
            options = {"load_format": "dummy", "device": "cpu", "kernels": "cpu", "num_blocks": 64}
            with LLM(folder, tensor_parallel_size=tp, **options) as llm:
                answers.add(tuple(llm.generate([[5, 6, 7]], PARAMS)[0].outputs[0].token_ids))
            after_first = after_first or left_behind()
            if left_behind() != after_first:
                print(f"after {number + 1} starts: {left_behind()}; after the first: {after_first}")
                return 1
    seconds = (time.perf_counter() - began) / count
    print(
        f"{count} starts and stops at tp {tp}, {seconds:.2f} s each; nothing left, {len(answers)} different answer(s)"
    )
    return int(len(answers) != 1)


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    sys.exit(main(*given, *(200, 2)[len(given) :]))
