"""Builds an LLMEngine on a FakeExecutor, and runs it to the end with its invariants checked after every step."""

from __future__ import annotations

from collections.abc import Callable

from fake_executor import FakeExecutor

from nanoinfer.config import SamplingParams
from nanoinfer.engine.block_manager import BlockManager
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.outputs import RequestOutput
from nanoinfer.engine.scheduler import Scheduler

VOCAB = 50


class Ticks:
    """A clock that advances one second each time it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_prefill_chunk: int | None = None,
    policy: str = "mixed",
    enable_prefix_caching: bool = True,
    overlap: bool = False,
    max_model_len: int = 10_000,
    is_lowered: bool = False,
    eos: frozenset[int] = frozenset(),
    vocab_size: int = VOCAB,
    clock: Callable[[], float] | None = None,
    detokenizer: object = None,
) -> tuple[LLMEngine, FakeExecutor]:
    executor = FakeExecutor(num_blocks, block_size, vocab_size)
    scheduler = Scheduler(
        BlockManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
        policy=policy,  # type: ignore[arg-type]
    )
    engine = LLMEngine(
        scheduler,
        executor,
        make_detokenizer=detokenizer,  # type: ignore[arg-type]
        vocab_size=vocab_size,
        eos_token_ids=eos,
        max_model_len=max_model_len,
        is_lowered=is_lowered,
        overlap=overlap,
        clock=clock or Ticks(),
    )
    return engine, executor


def run(engine: LLMEngine, max_steps: int = 10_000) -> dict[str, RequestOutput]:
    """Step until nothing is left; integrity after each step, and an empty pool at the end."""
    done = {}
    for _ in range(max_steps):
        if not engine.has_unfinished:
            break
        for delta in engine.step():
            if delta.output is not None:
                done[delta.request_id] = delta.output
        assert engine.check_integrity() == []
    assert not engine.has_unfinished, "the engine did not come to an end"
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.block_manager.num_active_blocks == 0
    return done


def greedy(max_tokens: int, **options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)  # type: ignore[arg-type]
