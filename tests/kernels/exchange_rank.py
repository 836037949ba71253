"""One rank of test_peer_exchange.py, in Triton's interpreter: its device memory is a file that all ranks map.

python exchange_rank.py RANK SIZE CAPACITY FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import triton_interpreter  # noqa: F401

from nanoinfer.kernels.peer_exchange import PeerBuffers, all_gather, all_reduce

LINES = 2
SIZES = [2, 60, 62, 64, 248, 600, 126, 2, 248]  # elements: lines have 62 in 16 bits, 31 in 32
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


def part(rank: int, step: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Eighths, whose sums are exact: to bfloat16 the interpreter cuts off and does not round."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return (torch.randint(-64, 64, (count,), generator=generator) / 8).to(dtype)


def main(rank: int, size: int, capacity: int, folder: Path) -> None:
    nbytes = PeerBuffers.nbytes(size, capacity)
    memory = [torch.from_file(str(folder / str(i)), shared=True, size=nbytes, dtype=torch.uint8) for i in range(size)]
    buffers = PeerBuffers.at([x.data_ptr() for x in memory], rank, capacity, torch.device("cpu"), LINES)
    for step, (elements, dtype) in enumerate((elements, dtype) for dtype in DTYPES for elements in SIZES):
        parts = [part(i, step, elements, dtype) for i in range(size)]
        expected = torch.stack(parts).float().sum(dim=0).to(dtype)
        assert torch.equal(all_reduce(parts[rank].clone(), buffers), expected), (step, elements, dtype)
        ids = torch.stack(
            [torch.arange(min(elements // 2, 31 * capacity)) * (-1) ** i * (step + 1) + i for i in range(size)]
        )
        gathered = all_gather(ids[rank].to(torch.int32), buffers)
        assert gathered.tolist() == ids.tolist(), (step, elements)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
