"""The records that cross between the planes: ScheduledBatch goes down to the tensors, StepResult comes back.

The data plane keeps one *row* of state per running sequence (its tokens, block table and sampling parameters), so a
step names known sequences by row and sends only what is new: sequences that enter a row, and blocks that were added.
Sampled tokens stay in the data plane's rows and feed the next step from there; the scheduler never sends them back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from nanoinfer.config import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that takes a row in this step: a fresh one, or one that resumes after a preemption."""

    row: int
    token_ids: list[int]  # all tokens known so far: the prompt, then what was generated before a preemption
    prompt_len: int
    block_table: list[int]  # physical block ids that cover at least `token_ids`
    sampling: SamplingParams
    seed: int  # seed of this sequence's own random numbers; token i always uses (seed, i)
    stop_token_ids: tuple[int, ...]  # the ids that end it, which must not be sampled before sampling.min_tokens


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. The parallel lists describe its sequences, those that decode one token first, then prefill chunks.

    Sequence i computes the tokens at positions starts[i] .. starts[i] + query_lens[i] - 1 of its row; their keys and
    values go to the row's blocks; attention reads positions 0 .. starts[i] + query_lens[i] - 1. Where is_sampled[i] is
    false the chunk ends before the last known token, and the sequence gets no new one.
    """

    step: int
    new_sequences: list[NewSequence]
    new_blocks: list[tuple[int, int]]  # (row, block id), appended to the row's table before the step runs
    rows: list[int]
    starts: list[int]
    query_lens: list[int]
    is_sampled: list[bool]
    num_decodes: int  # how many leading sequences compute one token and are sampled


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position, of the model's own distribution (before temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the most likely (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one token id for each sequence with is_sampled[i], in the batch's order."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None  # parallel to token_ids; None when no sequence asked
    device_ms: float = 0.0  # on a CPU the whole step, which the host computes itself
    used_graph: bool = False


class StepHandle(Protocol):
    """A step under way on the device."""

    def result(self) -> StepResult:
        """Wait for the step and return what it sampled; raises EngineError if it failed."""
        ...


class Executor(Protocol):
    """Runs steps in the order in which they are submitted. The real ones are LocalExecutor and ParallelExecutor."""

    def submit(self, batch: ScheduledBatch) -> StepHandle: ...

    def discard(self) -> None:
        """Forget every step that was submitted and whose result nobody will ask for; it still runs to its end."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """A StepHandle whose result is there already, for executors that run synchronously."""

    step_result: StepResult = field(repr=False)

    def result(self) -> StepResult:
        return self.step_result
