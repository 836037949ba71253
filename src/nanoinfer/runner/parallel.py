"""The data plane of several ranks, built from rank 0: a process and a device for each, and a group of them all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanoinfer.config import EngineConfig
from nanoinfer.errors import ConfigError, NanoinferError, RankError
from nanoinfer.layers.group import Group
from nanoinfer.models.config import ModelConfig
from nanoinfer.models.partition import Partition
from nanoinfer.models.weights import WeightSlot
from nanoinfer.runner.build import DataPlane, LoadWeights, build_data_plane
from nanoinfer.runner.parallel_executor import ParallelExecutor
from nanoinfer.runner.process_group import join_ranks, open_store
from nanoinfer.runner.ranks import Ranks
from nanoinfer.runner.torchrun import Launch
from nanoinfer.runner.worst_step import MemoryMark


def build_parallel(
    config: EngineConfig,
    model_config: ModelConfig,
    device: torch.device,
    ranks: Ranks,
    store: Any = None,
    *,
    folder: Path,
    load: LoadWeights,
    launch: Launch | None = None,
) -> tuple[DataPlane, ParallelExecutor]:
    """Build every rank's part at the same time; `load` is rank 0's, the others read `folder` themselves.

    `store` and `launch` are given where somebody else has started the ranks. Errors are those of `build_data_plane`,
    and EngineError if a rank fails. Then all ranks are ended and nothing is left.
    """
    size = config.tensor_parallel_size
    ranks_on_host = size if launch is None else launch.ranks_on_host
    devices = rank_devices(device, ranks_on_host)
    threads, restore_threads = _threads_per_rank(device, ranks_on_host)
    torch.set_num_threads(threads)
    partition, group = Partition(0, size), None
    try:
        ranks.wait_for("started")  # from here on the ranks are together, and time limits count
        store = store or open_store(partition, None, config.tp_timeout)
        ranks.tell(
            lambda rank: {
                "rank": rank,
                "size": size,
                "device": str(devices[rank] if launch is None else device),
                "threads": threads,
                "store": [store.host, store.port] if launch is None else None,
                "timeout_s": config.tp_timeout,
                "folder": str(folder),
                "config": asdict(config),
            }
        )
        start = MemoryMark.now(devices[0])
        group = ranks.watching(partial(_connect, store, partition, devices[0], ranks_on_host, config.tp_timeout))

        def load_together(slots: Mapping[str, WeightSlot]) -> None:
            load(slots)
            ranks.wait_for("loaded")
            ranks.tell(lambda rank: {})

        with ranks.on_loss(group.abort):  # the worst step's exchanges would wait for a rank that is gone
            plane = build_data_plane(config, model_config, devices[0], load=load_together, group=group, start=start)
        ranks.wait_for("ready")
        ranks.limit_sending(config.tp_timeout)
    except BaseException as error:
        torch.set_num_threads(restore_threads)
        explained = _end_all(ranks, group, error)
        if explained is not None:
            raise explained from error
        raise
    return plane, ParallelExecutor(
        plane.runner, group, ranks, config.tp_timeout, lambda: torch.set_num_threads(restore_threads)
    )


def _connect(store: Any, partition: Partition, device: torch.device, ranks_on_host: int, timeout_s: float) -> Group:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device of its own
    return join_ranks(store, partition, device, ranks_on_host=ranks_on_host, timeout_s=timeout_s)


def _end_all(ranks: Ranks, group: Group | None, error: BaseException) -> NanoinferError | None:
    """End all ranks and their group after `error` on this one; returns what to raise in its place, None for itself."""
    if group is not None:
        with suppress(RuntimeError, OSError):
            group.abort()
    explained = ranks.explain(error) if isinstance(error, RankError | OSError) else None
    ranks.kill()
    if group is not None:  # a caller may try again with less, and needs what this has
        with suppress(RuntimeError, OSError):
            group.close()
    return explained


def rank_devices(device: torch.device, size: int) -> list[torch.device]:
    """The device of each rank: GPUs that follow each other, or the CPU for all; ConfigError if there are too few."""
    if device.type != "cuda":
        return [device] * size
    first, count = device.index or 0, torch.cuda.device_count()
    if first + size > count:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but torch sees {count} CUDA device{'s' * (count != 1)}"
            f"{f' and --device starts at {first}' if first else ''}; use a smaller --tp or --device cpu."
        )
    return [torch.device("cuda", first + rank) for rank in range(size)]


def _threads_per_rank(device: torch.device, size: int) -> tuple[int, int]:
    """(threads for each rank, this process's threads now): a CPU's cores are shared out unless the user has done so."""
    now = torch.get_num_threads()
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return now, now
    return max(1, now // size), now
