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
    for package in ("torch", "transformers", "numpy", "xxhash"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            result[package] = None
    return result
