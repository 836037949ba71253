"""The environment of a benchmark, read from package metadata without importing anything, and `nanoinfer --version`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from nanoinfer import __version__
from nanoinfer.ui.console import Console

WIDTH = len("safetensors")
_REPORTED = ("torch", "triton", "flash-attn", "numba", "numpy", "tokenizers", "safetensors")


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


def print_version(console: Console) -> None:
    """The environment, one fact a line, nanoinfer's own version first; torch, which takes a while, comes last."""
    facts = environment()
    for name, value in facts.items():
        _print_fact(name, str(value) if value is not None else "not installed")
    console.status("asking torch ...")
    try:
        from nanoinfer.runner.machine import machine_facts

        found = machine_facts()
    except (ImportError, OSError) as error:  # a library of torch that is missing is an OSError
        console.clear_status()
        _print_fact("torch", f"cannot be imported: {error}")
        return
    console.clear_status()
    for name, sentence in found:
        _print_fact(name, sentence)


def _print_fact(name: str, value: str) -> None:
    print(f"{name:{WIDTH}}  {value}", flush=True)


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
