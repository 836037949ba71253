"""The facts about a machine that belong to every measured number."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def facts() -> dict[str, object]:
    """Processor, cores, memory in GiB, Python and the versions of the packages that matter."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    result: dict[str, object] = {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    for package in ("torch", "transformers", "numpy", "numba", "xxhash"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = None
    return result | _gpu_facts()


def _gpu_facts() -> dict[str, object]:
    """The GPU and its measured ceilings: copy in TB/s (bytes read and written), bf16 products in TFLOP/s."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from triton.testing import do_bench

    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = do_bench(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product_ms = do_bench(lambda: a @ b)
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "copy_tb_s": round(2 * source.numel() / copy_ms / 1e9, 2),
        "bf16_tflop_s": round(2 * 8192**3 / product_ms / 1e9),
    }
    torch.cuda.empty_cache()
    return facts
