"""A sequence: the tokens of one sample, how far their KV is computed, and the blocks that hold it."""

from __future__ import annotations

from enum import Enum, StrEnum

from nanoinfer.config import SamplingParams
from nanoinfer.engine.batch import TokenLogprobs
from nanoinfer.engine.events import RequestTiming


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Sequence:
    """One of the n samples of a request. The scheduler moves it; its block manager keeps table, cursor and digests.

    `num_tokens` counts the tokens it has once all submitted steps have run. The host knows the ids of the first
    len(token_ids) of them; with overlap, the newest one can still be on the device. `num_computed_tokens` is the one
    cursor of progress: positions below it have their KV in `block_table` once all submitted steps have run, whether
    they came from the prefix cache, a prefill chunk or a decode.
    """

    __slots__ = (
        "arrival_order",
        "arrival_time",
        "block_contents",
        "block_digests",
        "block_table",
        "error",
        "finish_reason",
        "finished_time",
        "first_scheduled_time",
        "index",
        "logprobs",
        "max_len",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_published_blocks",
        "num_tokens",
        "one_token",
        "prompt_len",
        "request_id",
        "row",
        "sampling",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "token_times",
    )

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_token_ids: list[int],
        sampling: SamplingParams,
        *,
        arrival_order: int,
        arrival_time: float,
        max_len: int,
        stop_token_ids: frozenset[int],
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.one_token = (request_id, 1)  # its part of StepEvent.emitted, the same object in every event
        self.index = index
        self.arrival_order = arrival_order
        self.token_ids = list(prompt_token_ids)
        self.prompt_len = len(prompt_token_ids)
        self.sampling = sampling
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.max_len = max_len  # prompt and output together, in tokens; reaching it finishes with LENGTH

        self.num_tokens = self.prompt_len
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at the first scheduling
        self.block_table: list[int] = []
        # Of the leading full blocks of token_ids, as far as needed so far: chained digests, and tokens as packed bytes.
        self.block_digests: list[bytes] = []
        self.block_contents: list[bytes] = []
        self.num_published_blocks = 0  # leading blocks of the table that need no publishing any more
        self.row = -1  # its row in the data plane; -1 unless RUNNING

        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: tuple[str, str] | None = None  # (code, message) when finish_reason is ERROR
        self.num_preemptions = 0
        self.arrival_time = arrival_time  # all times in seconds on the engine's clock
        self.first_scheduled_time: float | None = None
        self.finished_time: float | None = None
        self.token_times: list[float] = []  # when each output token reached the host
        self.logprobs: list[TokenLogprobs] = []  # one for each output token if the request asked for them

    @property
    def num_output_tokens(self) -> int:
        """Output tokens whose ids the host knows."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def has_token_in_flight(self) -> bool:
        """Whether a sampled token is still on the device, its id unknown to the host."""
        return self.num_tokens > len(self.token_ids)

    @property
    def timing(self) -> RequestTiming:
        return RequestTiming(
            arrival=self.arrival_time,
            first_scheduled=self.first_scheduled_time,
            first_token=self.token_times[0] if self.token_times else None,
            last_token=self.token_times[-1] if self.token_times else None,
            finished=self.finished_time,
        )

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}[{self.index}], {self.status.value}, {self.num_computed_tokens} of "
            f"{self.num_tokens} computed, prompt {self.prompt_len}, {len(self.block_table)} blocks)"
        )
