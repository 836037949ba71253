"""The state of running sequences on the device, one row each, so that a decode step sends next to nothing."""

from __future__ import annotations

import numpy as np
import torch

from nanoinfer.engine.batch import ScheduledBatch
from nanoinfer.kernels.rows import RowState
from nanoinfer.runner.input_batch import SequenceRows
from nanoinfer.runner.sampling_table import SamplingTable
from nanoinfer.runner.upload import upload


class DeviceRows:
    """R = max_num_seqs rows and one more, the padding row, which graphs point their unused places at.

    last_tokens int64 [R + 1]: the newest token of a row, written when the row is taken and by each step that
    samples, and read by the next decode.
    block_tables int32 [R + 1, most blocks]; prompt_lens, seeds int64 [R + 1]; temperatures float32 [R + 1].
    """

    def __init__(self, host: SequenceRows, table: SamplingTable, device: torch.device) -> None:
        num_rows, width = host.block_tables.shape
        self.padding_row = num_rows
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros(num_rows + 1, width, dtype=torch.int32, device=device)
        self.prompt_lens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(num_rows + 1, dtype=torch.float32, device=device)
        self._host, self._table, self._device = host, table, device

    @property
    def state(self) -> RowState:
        return RowState(self.last_tokens, self.block_tables, self.prompt_lens, self.seeds, self.temperatures)

    def update(self, batch: ScheduledBatch) -> None:
        """Send what the batch adds; the host's rows have taken it in already."""
        host, table, device = self._host, self._table, self._device
        if batch.new_sequences:
            rows = np.array([sequence.row for sequence in batch.new_sequences])
            index = upload(rows, device)
            width = int(host.num_blocks[rows].max())
            self.block_tables[:, :width].index_copy_(0, index, upload(host.block_tables[rows, :width], device))
            # A prefill that ends one token short is followed by a decode of the last known token.
            newest = np.array([sequence.token_ids[-1] for sequence in batch.new_sequences])
            self.last_tokens.index_copy_(0, index, upload(newest, device))
            self.prompt_lens.index_copy_(0, index, upload(host.prompt_lens[rows], device))
            self.seeds.index_copy_(0, index, upload(table.seed[rows], device))
            self.temperatures.index_copy_(0, index, upload(table.temperature[rows], device))
        if batch.new_blocks:
            added = np.array(batch.new_blocks)
            # The host has counted the block already, so it is the row's last one.
            where = upload(np.stack([added[:, 0], host.num_blocks[added[:, 0]] - 1, added[:, 1]]), device)
            self.block_tables.index_put_((where[0], where[1]), where[2].to(torch.int32))
