"""LLMEngine: text, stop strings, deltas, events, and what a caller gets back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engines import VOCAB, Ticks, greedy, make_engine, run
from fake_executor import FakeExecutor, expected_tokens

from nanoinfer.engine.batch import ScheduledBatch, StepHandle, StepResult
from nanoinfer.engine.detokenizer import IncrementalDetokenizer
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.outputs import OutputDelta


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def detokenizer(prompt: Sequence[int], stop: tuple[str, ...], min_tokens: int) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(letters, prompt, stop=stop, min_tokens=min_tokens)


def drain(engine: LLMEngine) -> list[OutputDelta]:
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    return deltas


@pytest.mark.parametrize("overlap", [False, True])
def test_streamed_pieces_join_to_the_finished_text(overlap: bool) -> None:
    engine, _ = make_engine(detokenizer=detokenizer, overlap=overlap)
    engine.add_request("s", [1, 2, 3], greedy(8, n=2), stream=True)
    engine.add_request("b", [1, 2, 3], greedy(8))
    deltas = drain(engine)
    output = next(d.output for d in deltas if d.request_id == "s" and d.output)
    batch = next(d.output for d in deltas if d.request_id == "b" and d.output)
    for index in (0, 1):
        mine = [d for d in deltas if d.request_id == "s" and d.index == index]
        assert "".join(d.text for d in mine) == output.outputs[index].text == batch.outputs[0].text
        assert [t for d in mine for t in d.token_ids] == expected_tokens([1, 2, 3], 8, VOCAB)
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + ["length"]
    assert len([d for d in deltas if d.request_id == "b"]) == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_is_cut_exactly_and_never_streamed(overlap: bool, stream: bool) -> None:
    full = letters(expected_tokens([4], 12, VOCAB))
    stop = full[5:8]
    engine, _ = make_engine(detokenizer=detokenizer, overlap=overlap)
    engine.add_request("r", [4], greedy(12, stop=[stop]), stream=stream)
    deltas = drain(engine)
    sample = deltas[-1].output.outputs[0]  # type: ignore[union-attr]
    assert sample.text == full[: full.index(stop)]
    assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
    assert len(sample.token_ids) == full.index(stop) + 3
    if stream:
        assert "".join(d.text for d in deltas) == sample.text
    assert engine.check_integrity() == []
    assert engine.scheduler.block_manager.num_active_blocks == 0


def test_a_stop_string_completed_by_the_last_allowed_token_counts_as_stop() -> None:
    full = letters(expected_tokens([4], 6, VOCAB))
    engine, _ = make_engine(detokenizer=detokenizer)
    engine.add_request("r", [4], greedy(6, stop=[full[3:6]]))
    sample = run(engine)["r"].outputs[0]
    assert (sample.text, sample.finish_reason) == (full[:3], "stop")


def test_the_token_that_stopped_a_sequence_is_not_in_its_text_but_the_last_token_at_max_tokens_is() -> None:
    """One engine dropped the last token whenever it stopped, also at max_tokens."""
    tokens = expected_tokens([4], 5, VOCAB)
    engine, _ = make_engine(detokenizer=detokenizer, eos=frozenset([tokens[4]]))
    engine.add_request("stopped", [4], greedy(9))
    engine.add_request("length", [4], greedy(3))
    outputs = run(engine)
    first = tokens.index(tokens[4])
    assert outputs["stopped"].outputs[0].text == letters(tokens[:first])
    assert outputs["stopped"].outputs[0].token_ids == tokens[: first + 1]
    assert outputs["length"].outputs[0].text == letters(tokens[:3])


def test_an_abort_returns_the_partial_text() -> None:
    engine, _ = make_engine(detokenizer=detokenizer)
    engine.add_request("r", [4], greedy(9))
    for _ in range(4):
        engine.step()
    output = engine.abort("r")
    assert output is not None
    assert output.outputs[0].text == letters(expected_tokens([4], 4, VOCAB))
    assert output.outputs[0].finish_reason == "abort"


def test_events_add_up_to_what_happened() -> None:
    engine, executor = make_engine(num_blocks=12, block_size=2, max_num_batched_tokens=8, clock=Ticks())
    subscription = engine.events.subscribe()
    prompts = {name: [ord(name[0]) % VOCAB] * (3 + i) for i, name in enumerate("abcde")}
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, greedy(7))
    outputs = run(engine)
    events = subscription.drain()
    assert sum(event.prefill_tokens + event.decode_tokens for event in events) == executor.computed_tokens
    assert sum(n for event in events for _, n in event.emitted) == 35
    finished = {f.request_id: f for event in events for f in event.finished}
    assert finished.keys() == prompts.keys()
    assert sum(event.preemptions for event in events) == sum(f.preemptions for f in finished.values()) > 0
    for event in events:
        assert event.blocks_active + event.blocks_cached + event.blocks_free == 12
    for name, record in finished.items():
        timing = record.timing
        assert timing == outputs[name].timing
        assert record.token_times == tuple(sorted(record.token_times))
        assert timing.first_scheduled is not None
        assert timing.arrival < timing.first_scheduled < record.token_times[0] == timing.first_token
        told = [(event.time, at) for event in events for each, at in event.first_tokens if each == name]
        assert told == [(timing.first_token, timing.arrival)], "once, in the step that sampled it"
        # E2E = TTFT + TPOT x (n - 1), exactly.
        n = record.output_tokens
        tpot = (record.token_times[-1] - record.token_times[0]) / (n - 1)
        assert timing.last_token - timing.arrival == pytest.approx(
            record.token_times[0] - timing.arrival + tpot * (n - 1)
        )


def test_an_event_without_a_step_does_not_shorten_the_step_under_way() -> None:
    engine, _ = make_engine(overlap=True)
    events = engine.events.subscribe()
    for name in ("a", "b"):
        engine.add_request(name, [1, 2], greedy(1))
    engine.step()  # submits the first step, which is then under way
    engine.abort("b")
    engine.step()
    idle, step = events.drain()
    assert (idle.kind, idle.step_ms) == ("idle", 0)
    assert step.step_ms > 1e3 * (step.time - idle.time)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_step_under_way_when_the_last_request_ends_does_not_become_a_long_one(aborted: bool) -> None:
    """It stayed until the next request came, and then seemed to have taken all the time that a person thought."""
    clock = Ticks()
    tokens = expected_tokens([1, 2], 3, VOCAB)
    engine, executor = make_engine(overlap=True, eos=frozenset([tokens[1]]), clock=clock)
    events = engine.events.subscribe()
    engine.add_request("a", [1, 2], greedy(9))
    for _ in range(2 if aborted else 9):
        engine.step()
    engine.abort("a")
    assert executor.num_discards == 1
    clock.now += 1000
    engine.add_request("b", [5], greedy(1))
    run(engine)
    assert max(event.step_ms for event in events.drain()) < 100e3


def test_cached_tokens_are_reported_per_request_and_per_step() -> None:
    engine, _ = make_engine(block_size=4)
    subscription = engine.events.subscribe()
    prompt = list(range(11))
    for name in ("first", "second"):
        engine.add_request(name, prompt, greedy(2))
        output = run(engine)[name]
        assert output.usage.cached_tokens == (0 if name == "first" else 8)
    events = subscription.drain()
    assert (sum(e.cached_tokens for e in events), sum(e.prompt_tokens for e in events)) == (8, 22)


def test_prefill_after_a_preemption_is_no_cache_hit() -> None:
    engine, executor = make_engine(num_blocks=7, block_size=2, max_num_seqs=3)
    subscription = engine.events.subscribe()
    for name, first in (("old", 1), ("new", 4)):
        engine.add_request(name, [first, first + 1, first + 2], greedy(9))
    outputs = run(engine)
    events = subscription.drain()
    assert outputs["new"].outputs[0].preemptions >= 1
    starts = [
        dict(zip(batch.rows, batch.starts, strict=True))[new.row]
        for batch in executor.batches
        for new in batch.new_sequences
    ]
    assert starts[:2] == [0, 0]
    assert any(starts), "the preempted one found blocks of its own again"
    assert [output.usage.cached_tokens for output in outputs.values()] == [0, 0]
    assert (sum(e.cached_tokens for e in events), sum(e.prompt_tokens for e in events)) == (0, 6)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_token_counts_from_when_its_id_has_arrived(overlap: bool) -> None:
    """The time at which a step is launched says nothing: the device may still be at work."""
    now = [0.0]

    class Slow(FakeExecutor):
        def submit(self, batch: ScheduledBatch) -> StepHandle:
            handle = super().submit(batch)

            class Handle:
                def result(self) -> StepResult:
                    now[0] += 5.0
                    return handle.result()

            return Handle()

    engine, executor = make_engine(clock=lambda: now[0], overlap=overlap)
    executor.__class__ = Slow
    engine.add_request("a", [1, 2, 3], greedy(3))
    timing = run(engine)["a"].timing
    assert (timing.ttft_ms, timing.e2e_ms) == (5000.0, 15000.0)


def test_every_subscription_hears_every_event_until_it_ends() -> None:
    engine, _ = make_engine()
    first, second = engine.events.subscribe(), engine.events.subscribe()
    engine.add_request("a", [1], greedy(6))
    run(engine)
    assert [event.step for event in first.drain()] == list(range(6))
    engine.events.unsubscribe(first)
    engine.add_request("b", [2], greedy(3))
    run(engine)
    assert (len(first.drain()), len(second.drain())) == (0, 9)


def test_results_are_keyed_by_request_over_several_calls() -> None:
    """Results keyed by the loop's index were mixed up on the second batch."""
    engine, _ = make_engine(max_num_seqs=2)
    for call in range(2):
        for i in range(5):
            engine.add_request(f"{call}-{i}", [call, i], greedy(1 + i))
        for name, output in run(engine).items():
            call_, i = map(int, name.split("-"))
            assert output.outputs[0].token_ids == expected_tokens([call_, i], 1 + i, VOCAB)
