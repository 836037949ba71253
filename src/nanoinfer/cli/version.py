"""`nanoinfer --version` and the environment of a benchmark, read from package metadata without importing anything."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from nanoinfer import __version__

_REPORTED = ("torch", "triton", "flash-attn", "numpy", "numba", "tokenizers", "safetensors")


def environment() -> dict[str, str | int | None]:
    """Versions and the machine's facts; None for a package that is not installed."""
    facts: dict[str, str | int | None] = {
        "nanoinfer": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
    }
    for package in _REPORTED:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = None
    return facts


def version_report() -> str:
    """The environment, one fact a line, nanoinfer's own version first."""
    facts = environment()
    width = max(map(len, facts))
    lines = [f"{name:{width}}  {value if value is not None else 'not installed'}" for name, value in facts.items()]
    return "\n".join(lines)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
