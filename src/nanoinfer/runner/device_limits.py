"""What a device can do, measured: bytes per second of a large copy, operations per second of a large matrix product."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanoinfer.engine.info import DeviceLimits
from nanoinfer.runner.memory import usable_memory

# Sizes that no cache holds and that keep the device busy far longer than a launch takes, within a tenth of a second.
CUDA_COPY_BYTES, CPU_COPY_BYTES = 1 << 30, 1 << 27
CUDA_PRODUCT, CPU_PRODUCT = 8192, 1024
PRODUCT_BYTES = 3 * 4  # of two factors and their product in float32, for each element
SPEND_S = 0.15  # on each figure, after one untimed call


def measure_limits(device_name: str, dtype_name: str) -> DeviceLimits:
    """Measure `device_name` ("cpu", "cuda:0"). The best of several calls counts.

    Products are in `dtype_name` on CUDA. On a CPU they are in float32, as the engine's are whatever the weights' dtype.
    """
    device = torch.device(device_name)
    on_cuda = device.type == "cuda"
    dtype = getattr(torch, dtype_name) if on_cuda else torch.float32
    product = CUDA_PRODUCT if on_cuda else CPU_PRODUCT
    # The engine's pool has taken most of a GPU: a quarter of the rest holds what is measured with ease.
    spare = torch.cuda.mem_get_info(device)[0] // 4 if on_cuda else CPU_COPY_BYTES
    while PRODUCT_BYTES * product**2 > spare and product > CPU_PRODUCT:
        product //= 2
    return DeviceLimits(
        name=torch.cuda.get_device_name(device) if on_cuda else _cpu_name(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_cuda else usable_memory(),
        threads=None if on_cuda else torch.get_num_threads(),
        copy_bytes_per_s=_copy_bytes_per_s(device, min(CUDA_COPY_BYTES if on_cuda else CPU_COPY_BYTES, spare)),
        flops_per_s=_flops_per_s(device, dtype, product),
    )


def _copy_bytes_per_s(device: torch.device, size: int) -> float:
    source = torch.ones(size, dtype=torch.uint8, device=device)  # written once, so that its pages exist
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), device)


def _flops_per_s(device: torch.device, dtype: torch.dtype, n: int) -> float:
    a, b = (torch.rand(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b, out=out), device)


@torch.inference_mode()
def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    best, spent = float("inf"), 0.0
    call()
    while spent < SPEND_S:
        _wait(device)
        began = time.perf_counter()
        call()
        _wait(device)
        seconds = time.perf_counter() - began
        best, spent = min(best, seconds), spent + seconds
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "CPU"
