"""Sums and gathers over ranks that write each other's memory, against torch."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from nanoinfer.kernels.peer_exchange import PeerBuffers, all_gather, all_reduce

CAPACITY = 8  # lines, of 31 words


@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathers_of_any_size_in_turn(size, tmp_path):
    """Processes with common memory: in one, the interpreter would run one rank after the other, and wait for ever."""
    for rank in range(size):
        (tmp_path / str(rank)).write_bytes(bytes(PeerBuffers.nbytes(size, CAPACITY)))
    command = [sys.executable, Path(__file__).parent / "exchange_rank.py"]
    without_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    with ExitStack() as stack:
        ranks = []
        for rank in range(size):
            arguments = [str(rank), str(size), str(CAPACITY), tmp_path]
            process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, env=without_gpu)
            ranks.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in ranks:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-2000:]


def lonely(device, size=2):
    """The buffers of rank 0, for 16 lines of 31 words, whose peers never send."""
    memory = [torch.zeros(PeerBuffers.nbytes(size, 16) // 4, dtype=torch.int32, device=device) for _ in range(size)]
    return memory, PeerBuffers.at([x.data_ptr() for x in memory], 0, 16, device)


def test_the_abort_flag_ends_the_wait_for_a_dead_rank(device):
    memory, buffers = lonely(device)
    buffers.abort.fill_(1)
    all_reduce(torch.ones(64, device=device), buffers)
    all_gather(torch.ones(64, device=device), buffers)
    # Both slots of the peer have what it was sent: the data, and a number in each of three lines.
    assert (memory[1] != 0).sum() == 2 * (64 + 3)


def test_only_whole_words_in_one_piece_that_fit(device):
    _, buffers = lonely(device)
    assert buffers.fits(torch.ones(992, dtype=torch.bfloat16, device=device))
    assert not buffers.fits(torch.ones(994, dtype=torch.bfloat16, device=device))
    assert not buffers.fits(torch.ones(3, dtype=torch.bfloat16, device=device))
    assert not buffers.fits(torch.ones(8, 8, device=device)[:, :4])
    assert not buffers.fits(torch.ones(0, device=device))
    odd = torch.ones(9, dtype=torch.bfloat16, device=device)[1:]
    assert not buffers.fits(odd)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_ranks_on_one_device_in_graphs():
    device, size, capacity = torch.device("cuda", 0), 2, 1 << 10
    memory = [torch.zeros(PeerBuffers.nbytes(size, capacity) // 4, dtype=torch.int32, device=device) for _ in range(2)]
    ranks = [PeerBuffers.at([x.data_ptr() for x in memory], rank, capacity, device) for rank in range(size)]
    inputs = [torch.randn(40, 1024, device=device).bfloat16() for _ in range(size)]
    expected = (inputs[0].float() + inputs[1].float()).bfloat16()
    streams = [torch.cuda.Stream() for _ in range(size)]
    sums = []
    graphs = []
    for rank in range(size):
        # Compiled before any rank waits: a capture launches nothing, so neither graph can wait for the other.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[rank]):
            sums.append([all_reduce(inputs[rank].clone(), ranks[rank]) for _ in range(5)])
        graphs.append(graph)
    for _ in range(20):
        for rank in range(size):
            with torch.cuda.stream(streams[rank]):
                graphs[rank].replay()
    torch.cuda.synchronize()
    for per_rank in sums:
        for total in per_rank:
            assert torch.equal(total, expected)


@pytest.mark.parametrize("size", [2, 4])
def test_a_line_is_stored_and_loaded_by_one_instruction_of_eight_threads(size):
    """Only so does it arrive whole. Compiled for a Hopper GPU, which needs none."""
    source = Path(__file__).parent / "exchange_assembly.py"
    compiled = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, source, str(size)], capture_output=True, text=True, timeout=200, env=compiled
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assembly = result.stdout.splitlines()
    stores = [line for line in assembly if "st.global.v4.b32" in line]
    loads = [line for line in assembly if "ld.volatile.global.v4.b32" in line]
    assert len(stores) == 2 * (size - 1)  # of eight lines a thread stores two pieces of 16 bytes
    assert len(loads) == 2 * 2 * (size - 1)  # at first, and in the loop
