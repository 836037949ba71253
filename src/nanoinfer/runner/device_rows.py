"""The state of running sequences on the device, one row each, so that a decode step sends next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.runner.input_batch import SequenceRows
from nanoinfer.runner.sampling_table import SamplingTable

Upload = Callable[[NDArray[Any]], Tensor]


class DeviceRows:
    """R = max_num_seqs rows and one more, the padding row, which graphs point their unused places at.

    last_tokens int64 [R + 1]: the newest token of a row, written by the step that samples it and read by the next.
    block_tables int32 [R + 1, most blocks]; prompt_lens, seeds int64 [R + 1]; temperatures float32 [R + 1].
    """

    def __init__(self, host: SequenceRows, table: SamplingTable, device: torch.device, upload: Upload) -> None:
        num_rows, width = host.block_tables.shape
        self.padding_row = num_rows
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
        self.prompt_lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(num_rows + 1, dtype=torch.float32, device=device)
        self._host, self._table, self._upload = host, table, upload

    def update(self, batch: ScheduledBatch) -> None:
        """Send what the batch adds; the host's rows have taken it in already."""
        if batch.new_sequences:
            rows = np.array([sequence.row for sequence in batch.new_sequences])
            index = self._upload(rows)
            width = int(self._host.num_blocks[rows].max())
            self.block_tables[:, :width].index_copy_(0, index, self._upload(self._host.block_tables[rows, :width]))
            self.prompt_lens.index_copy_(0, index, self._upload(self._host.prompt_lens[rows]))
            self.seeds.index_copy_(0, index, self._upload(self._table.seed[rows]))
            self.temperatures.index_copy_(0, index, self._upload(self._table.temperature[rows]))
        if batch.new_blocks:
            added = np.array(batch.new_blocks)
            # The host has counted the block already, so it is the row's last one.
            where = self._upload(np.stack([added[:, 0], self._host.num_blocks[added[:, 0]] - 1, added[:, 1]]))
            self.block_tables.index_put_((where[0], where[1]), where[2].to(torch.int32))
