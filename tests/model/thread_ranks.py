"""Ranks as threads of one process, exchanging tensors through a list: tensor parallelism of any size for the price of
one process. Batches still go through the channel's bytes, and every step is compared over the ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from nanoinfer import llm as llm_module
from nanoinfer.engine.batch import CompletedStep
from nanoinfer.layers.group import Group
from nanoinfer.loading.weights import fill_weights
from nanoinfer.models.partition import Partition, check_splits
from nanoinfer.runner.build import build_data_plane
from nanoinfer.runner.channel import decode_batch, encode_batch


class ThreadGroup(Group):
    """`places` has a place per rank; the barrier separates writing from reading, and reading from the next writing."""

    def __init__(self, rank, size, places, barrier) -> None:
        super().__init__(Partition(rank, size), ranks_on_host=size)
        self._places, self._barrier = places, barrier
        self.num_exchanges = 0

    def _exchange(self, x):
        self.num_exchanges += 1
        self._places[self.rank] = x
        self._barrier.wait(30)
        everything = [y.clone() if isinstance(y, torch.Tensor) else y for y in self._places]
        self._barrier.wait(30)
        if isinstance(x, torch.Tensor):
            assert len({(y.shape, y.dtype) for y in everything}) == 1, everything
        return everything

    def all_reduce(self, x):
        parts = self._exchange(x)
        return torch.stack(parts).sum(dim=0)

    def all_gather(self, x):
        return torch.stack(self._exchange(x))

    def broadcast(self, x):
        return self._exchange(x)[0]

    def all_reduce_min(self, value):
        return min(self._exchange(value))


class ThreadRanks:
    """The executor of an engine whose ranks are threads."""

    def __init__(self, config, model_config, folder, groups) -> None:
        self._pool = ThreadPoolExecutor(len(groups))
        self.groups = groups

        def build(group):
            def load(slots):
                fill_weights(slots, folder, config.load_format, config.seed)

            return build_data_plane(config, model_config, torch.device("cpu"), load=load, group=group)

        self.planes = self._all(build, groups)

    def _all(self, function, *arguments):
        futures = [self._pool.submit(function, *each) for each in zip(*arguments, strict=True)]
        return [future.result() for future in futures]

    def submit(self, batch):
        payload = encode_batch(batch)
        batches = [batch, *(decode_batch(payload) for _ in self.groups[1:])]
        results = self._all(lambda plane, part: plane.runner.launch(part).result(), self.planes, batches)
        assert all(result.token_ids == results[0].token_ids for result in results)
        assert all(result.logprobs is None for result in results[1:])  # only rank 0 reports
        return CompletedStep(results[0])

    def discard(self): ...

    def close(self):
        self._pool.shutdown()


def use_thread_ranks(monkeypatch) -> None:
    """Make LLM start threads where it would start processes."""

    def open_data_plane(config, model_config, folder, notify):
        check_splits(model_config, config.tensor_parallel_size)
        size = config.tensor_parallel_size
        places, barrier = [None] * size, threading.Barrier(size)
        ranks = ThreadRanks(
            config, model_config, folder, [ThreadGroup(rank, size, places, barrier) for rank in range(size)]
        )
        assert len({plane.geometry for plane in ranks.planes}) == 1
        return ranks.planes[0], ranks

    monkeypatch.setattr(llm_module, "open_data_plane", open_data_plane)
