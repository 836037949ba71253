"""What torch finds on this machine, and why a part that would be faster is not in use: for `nanoinfer --version`."""

from __future__ import annotations

import os

import torch

from nanoinfer.attention import flash
from nanoinfer.config import EngineConfig
from nanoinfer.kernels import compiled_set, numba_set
from nanoinfer.kernels.cpu_set import has_native_product
from nanoinfer.runner import memory
from nanoinfer.runner.build import choose_back_ends, resolve_device, resolve_dtype


def machine_facts() -> list[tuple[str, str]]:
    """(name, sentence) of the devices and of each accelerated part, for an engine with default options."""
    device = resolve_device("auto")
    dtype = getattr(torch, resolve_dtype("auto", device))
    attention, why = choose_back_ends(EngineConfig(), device, dtype)[1:]
    return [
        ("CUDA", cuda_fact()),
        *((f"GPU {index}", _gpu(index)) for index in range(_num_gpus())),
        ("cores", f"{_usable_cores()} of {os.cpu_count()} usable; torch takes {torch.get_num_threads()} for its work"),
        ("CPU code", _cpu_code()),
        ("memory", f"{memory.usable_memory() / 2**30:.1f} GiB usable"),
        ("default", f"{device.type}, {str(dtype).removeprefix('torch.')}, {attention} attention ({why})"),
        *((part, f"not in use: {reason}") for part, reason in _not_in_use(device, dtype, attention)),
    ]


def cuda_fact() -> str:
    """The version of CUDA that torch is built for, or why there is none to use."""
    if torch.version.cuda is None:
        return "not in use: this torch is built without CUDA"
    if not _num_gpus():
        return f"not in use: torch is built for {torch.version.cuda}, but finds no GPU or no driver for it"
    return torch.version.cuda


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _gpu(index: int) -> str:
    facts = torch.cuda.get_device_properties(index)
    return f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB, compute capability {facts.major}.{facts.minor}"


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _cpu_code() -> str:
    narrow = [name for name in ("bfloat16", "float16") if has_native_product(getattr(torch, name))]
    return f"torch runs its {torch.backends.cpu.get_cpu_capability()} code; " + (
        f"products of {' and '.join(narrow)} in hardware" if narrow else "no products of bfloat16 in hardware"
    )


def _not_in_use(device: torch.device, dtype: torch.dtype, attention: str) -> list[tuple[str, str]]:
    """(part, reason) of everything that this device's default engine does without."""
    on_gpu = device.type == "cuda"
    parts: list[tuple[str, str | None]] = []
    if attention != "triton":
        parts.append(("Triton", "it needs a CUDA device" if not on_gpu else "the package triton is not installed"))
    flash_block = memory.DEFAULT_BLOCK_SIZES["flash-attn"]
    reason = flash.why_not(device, dtype, flash.MAX_HEAD_DIM, flash_block)
    parts.append(("flash-attn", reason or "Triton comes first; --attention flash-attn takes it"))
    parts.append(("numba", "the device is a GPU" if on_gpu else numba_set.why_not(dtype)))
    parts.append(("compile", compiled_set.why_not(device) or "torch.compile runs with --kernels compiled only"))
    return [(part, reason) for part, reason in parts if reason]
