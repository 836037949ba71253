"""How fast weights reach a device: safetensors files in the page cache, beside reading the same bytes and no more.

    python benchmarks/load_weights.py [--shape 0.6b|8b] [--device cuda] [--readers 4,8] [--json FILE]

Writes a file of that shape into a temporary folder (1.2 or 16 GB) and loads it several times into one decoder.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from gpu import SHAPES, model_folder
from machine import facts

from nanoinfer.kernels.kernel_set import EAGER
from nanoinfer.loading import safetensors
from nanoinfer.loading.folder import read_model_config
from nanoinfer.models.decoder import Decoder

PIECE = 64 << 20


def pieces(total: int) -> Iterator[memoryview]:
    random = torch.randn(PIECE // 2).to(torch.bfloat16).view(torch.uint8).numpy().data
    for start in range(0, total, PIECE):
        yield random[: min(PIECE, total - start)]


def read_only(path: Path, readers: int) -> float:
    """Seconds in which that many threads read the whole file into buffers of 8 MiB that stay the same."""
    size, step = path.stat().st_size, 8 << 20

    def read(first: int) -> None:
        buffer = memoryview(bytearray(step))
        with path.open("rb", buffering=0) as file:
            for start in range(first * step, size, readers * step):
                file.seek(start)
                file.readinto(buffer)

    started = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(read, range(readers)))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--readers", default="4", help="numbers of threads to try")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    config = read_model_config(Path(model_folder(options.shape)))
    slots = Decoder(config, kernels=EAGER, dtype=torch.bfloat16, device=device).weight_slots()
    total = sum(2 * math.prod(slot.shape) for slot in slots.values())
    results: list[dict[str, Any]] = [{"machine": facts(), "shape": options.shape, "gigabytes": round(total / 1e9, 2)}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        safetensors.write_safetensors(path, {n: ("BF16", slot.shape) for n, slot in slots.items()}, pieces(total))
        for readers in map(int, options.readers.split(",")):
            safetensors._READERS = readers
            speeds: dict[str, list[float]] = {"load": [], "read only": []}
            for _ in range(4):
                started = time.perf_counter()
                safetensors.load_weights(slots, Path(folder))
                if device.type == "cuda":
                    torch.cuda.synchronize()
                speeds["load"].append(total / (time.perf_counter() - started) / 1e9)
                speeds["read only"].append(total / read_only(path, readers) / 1e9)
            results.append({"readers": readers, "GB/s": {k: [round(x, 2) for x in v] for k, v in speeds.items()}})
            print(json.dumps(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
