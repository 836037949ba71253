"""From logits to token ids: each rule is applied to the rows that ask for it, and to no other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoinfer.engine.batch import TokenLogprobs
from nanoinfer.kernels import reference
from nanoinfer.kernels.kernel_set import KernelSet
from nanoinfer.layers.group import ALONE, Group
from nanoinfer.runner.input_batch import Int64Array, SequenceRows
from nanoinfer.runner.sampling_table import FILTER, LOGPROBS, MIN_TOKENS, PENALTIES, RANDOM, SamplingTable
from nanoinfer.runner.upload import upload


@dataclass(frozen=True)
class Sampled:
    """Token ids int64 [S]; `logprobs` parallel to them, None where a row did not ask or no row did."""

    token_ids: Tensor
    logprobs: list[TokenLogprobs | None] | None


class Sampler:
    """Chooses one token per row of logits. Order: min_tokens, penalties, temperature with top-k, top-p, min-p, draw.

    All ranks of `group` have the same logits and do the same, which costs no time; the choice of the first one counts.
    """

    def __init__(
        self,
        table: SamplingTable,
        rows: SequenceRows,
        kernels: KernelSet,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self._table = table
        self._rows = rows
        self._kernels = kernels
        self._device = device
        self._group = group

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)

    def sample(self, logits: Tensor, rows: Int64Array, lengths: Int64Array) -> Sampled:
        """logits float32 [S, V], changed in place; rows [S] of the tables; lengths [S] counts their known tokens."""
        needs = self._table.needs[rows]
        if not needs.any():
            return Sampled(logits.argmax(dim=-1), None)

        reporting = np.flatnonzero(needs & LOGPROBS) if self._group.rank == 0 else np.empty(0, np.int64)
        raw = logits[self._tensor(reporting)] if reporting.size else None
        self._apply_min_tokens(logits, needs, rows, lengths)
        self._penalise(logits, needs, rows, lengths)
        token_ids = self._group.broadcast(self._choose(logits, needs, rows, lengths))
        logprobs = None if raw is None else self._report(raw, reporting, rows, token_ids)
        return Sampled(token_ids, logprobs)

    def _apply_min_tokens(
        self, logits: Tensor, needs: NDArray[np.uint8], rows: Int64Array, lengths: Int64Array
    ) -> None:
        """Forbid the stop tokens of those that are too short; the others need nothing from their next step on."""
        selected = np.flatnonzero(needs & MIN_TOKENS)
        table_rows = rows[selected]
        reached = self._rows.token_indices(table_rows, lengths[selected]) >= self._table.min_tokens[table_rows]
        self._table.needs[table_rows[reached]] &= ~np.uint8(MIN_TOKENS)
        places = [(i, token) for i in selected[~reached] for token in self._table.stop_token_ids[rows[i]]]
        if places:
            at = self._tensor(np.array(places).T)
            logits.index_put_((at[0], at[1]), logits.new_full((), float("-inf")))

    def _penalise(self, logits: Tensor, needs: NDArray[np.uint8], rows: Int64Array, lengths: Int64Array) -> None:
        selected = np.flatnonzero(needs & PENALTIES)
        if not selected.size:
            return
        table, table_rows = self._table, rows[selected]
        known = self._rows.token_ids[table_rows, : int(lengths[selected].max())].astype(np.int64)
        index = self._tensor(selected)
        logits[index] = reference.apply_penalties(
            logits[index],
            self._tensor(known),
            self._tensor(self._rows.prompt_lens[table_rows]),
            self._tensor(lengths[selected]),
            self._tensor(table.repetition[table_rows]),
            self._tensor(table.presence[table_rows]),
            self._tensor(table.frequency[table_rows]),
        )

    def _choose(self, logits: Tensor, needs: NDArray[np.uint8], rows: Int64Array, lengths: Int64Array) -> Tensor:
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        for kind in (0, RANDOM, RANDOM | FILTER):
            selected = np.flatnonzero(needs & (RANDOM | FILTER) == kind)
            if selected.size == len(rows):  # the usual case, which needs no copy of the logits
                return self._draw(logits, rows, lengths, kind)
            if selected.size:
                index = self._tensor(selected)
                token_ids[index] = self._draw(logits[index], rows[selected], lengths[selected], kind)
        return token_ids

    def _draw(self, logits: Tensor, rows: Int64Array, lengths: Int64Array, kind: int) -> Tensor:
        """Rows that all need the same of RANDOM and FILTER."""
        if kind == 0:
            return logits.argmax(dim=-1)
        table = self._table
        temperatures, seeds = self._tensor(table.temperature[rows]), self._tensor(table.seed[rows])
        token_indices = self._tensor(self._rows.token_indices(rows, lengths))
        if kind == RANDOM:
            return self._kernels.sample(logits, temperatures, seeds, token_indices)
        top_k, top_p, min_p = (self._tensor(column[rows]) for column in (table.top_k, table.top_p, table.min_p))
        return self._kernels.filtered_sample(logits, temperatures, top_k, top_p, min_p, seeds, token_indices)

    def _report(
        self, raw: Tensor, reporting: Int64Array, rows: Int64Array, token_ids: Tensor
    ) -> list[TokenLogprobs | None]:
        wanted = self._table.logprobs[rows[reporting]].tolist()
        chosen_ids = token_ids[self._tensor(reporting)]
        chosen, top_values, top_ids = reference.token_logprobs(raw, chosen_ids, max(wanted))
        report: list[TokenLogprobs | None] = [None] * len(rows)
        for i, k, token_id, logprob, ids, values in zip(
            reporting.tolist(),
            wanted,
            chosen_ids.tolist(),
            chosen.tolist(),
            top_ids.tolist(),
            top_values.tolist(),
            strict=True,
        ):
            report[i] = TokenLogprobs(token_id, logprob, list(zip(ids[:k], values[:k], strict=True)))
        return report
