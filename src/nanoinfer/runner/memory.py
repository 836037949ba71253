"""Memory as arithmetic: what weights and KV blocks take, how much a device can give, what follows for the engine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.errors import MemoryBudgetError
from nanoinfer.models.config import ModelConfig

GIB = 1 << 30
# Tokens per KV block by attention back end (docs/decisions/060).
DEFAULT_BLOCK_SIZES = {"flash-attn": 256, "triton": 64, "torch": 16, "numba": 16}
CPU_KV_LIMIT = 4 * GIB
# What torch, its threads or context, and a step's activations take beside weights and pool (on a CPU about 0.4 GiB).
RUNTIME_OVERHEAD = GIB // 2
# Where the system does not say how much memory there is.
ASSUMED_MEMORY = 16 * GIB


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The KV pool's shape on one rank, and what a block of it takes in bytes."""

    block_size: int
    num_blocks: int
    bytes_per_block: int

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def capacity(self) -> int:
        """Tokens of the whole pool."""
        return self.num_blocks * self.block_size


def usable_memory() -> int:
    """Bytes that this process may use: the machine's memory, or less where a control group limits it."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, ValueError, OSError):  # not on Windows
        limits = [ASSUMED_MEMORY]
    # Control groups: version 2, then version 1.
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return min(limits)


def available_memory() -> int:
    """Bytes of `usable_memory` that nobody uses now, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(usable_memory(), int(line.split()[1]) * 1024)
    except OSError:
        pass
    return usable_memory()


def cpu_kv_budget(usable: int) -> int:
    """Bytes for the KV pool on a CPU: min(4 GiB, a quarter of the memory that the process may use)."""
    return min(CPU_KV_LIMIT, usable // 4)


def gpu_kv_budget(
    *, total: int, utilization: float, free_now: int, current: int, peak: int, non_torch: int, graph_reserve: int = 0
) -> int:
    """Bytes for the KV pool on a GPU after the profiling run; all arguments in bytes, all of this process.

    `total` and `free_now` are the device's; `current` and `peak` are torch's allocations now and at the worst step;
    `non_torch` is what this process holds outside torch (context, libraries, communication buffers).
    """
    ours = int(total * utilization) - (non_torch + peak)
    free = free_now - (peak - current)
    return min(ours, free) - graph_reserve


def plan_kv_pool(
    *,
    bytes_per_token: int,
    block_size: int,
    budget: int,
    max_num_seqs: int,
    max_model_len: int,
    num_blocks: int | None = None,
    is_budget_given: bool = False,
) -> KVGeometry:
    """How many blocks fit `budget`, up to twice what the longest sequences in all rows fill; `num_blocks` overrides.

    The second half is for cached prefixes of sequences that have ended.

    MemoryBudgetError if not even two blocks fit: one for a prompt and one to grow into.
    """
    bytes_per_block = bytes_per_token * block_size
    if num_blocks is None:
        most_in_use = max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(max(budget, 0) // bytes_per_block, 2 * most_in_use)
        if num_blocks < 2 and is_budget_given:
            raise MemoryBudgetError(
                f"--kv-memory is {_mib(budget)}, and two blocks of {block_size} tokens need "
                f"{_mib(2 * bytes_per_block)}; give at least that."
            )
        if num_blocks < 2:
            raise MemoryBudgetError(
                f"the memory left for the KV pool ({_mib(budget)}) does not hold two blocks of {block_size} tokens "
                f"({_mib(bytes_per_block)} each); free memory, use a smaller model or set --num-blocks."
            )
    return KVGeometry(block_size, num_blocks, bytes_per_block)


def require_memory(config: ModelConfig, dtype: str, kv_bytes: int, available: int, device: str, tp: int = 1) -> None:
    """Refuse, before the load, a model whose weights and KV pool (`kv_bytes`) do not fit in `available` bytes.

    With `tp` ranks all figures are of one of them.
    """
    weights = config.weight_bytes(dtype, tp)
    needed = weights + kv_bytes + RUNTIME_OVERHEAD
    if needed > available:
        raise MemoryBudgetError(
            f"this model does not fit: weights {_gib(weights)} as {dtype} + KV pool {_gib(kv_bytes)} + about "
            f"{_gib(RUNTIME_OVERHEAD)} for the rest = {_gib(needed)}, but {device} has {_gib(available)} available. "
            "Use a smaller model, --dtype bfloat16, or fewer --num-blocks."
        )


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
