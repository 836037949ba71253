"""The one property that catches most scheduling bugs, in three forms: the schedule never changes a result."""

from __future__ import annotations

from collections.abc import Callable

from engines import VOCAB, greedy, make_engine, run
from fake_executor import expected_tokens
from hypothesis import given, settings
from hypothesis import strategies as st


@st.composite
def workloads(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """(prompt, output tokens, arrival step), with prompts that share prefixes of various lengths."""
    base = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24))
    requests = []
    for _ in range(draw(st.integers(1, 9))):
        shared = draw(st.integers(0, len(base)))
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=10))
        requests.append((base[:shared] + own, draw(st.integers(1, 14)), draw(st.integers(0, 12))))
    return requests


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    longest = 24 + 10 + 14 + 1
    max_num_seqs = draw(st.integers(1, 6))
    return {
        "block_size": block_size,
        "num_blocks": -(-longest // block_size) + draw(st.integers(0, 20)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_seqs + draw(st.integers(0, 30)),
        "max_prefill_chunk": draw(st.sampled_from([None, 1, 3, block_size])),
        "policy": draw(st.sampled_from(["mixed", "prefill-first"])),
        "enable_prefix_caching": draw(st.booleans()),
        "overlap": draw(st.booleans()),
    }


def tokens_do_not_depend_on_the_schedule(
    requests: list[tuple[list[int], int, int]], options: dict[str, object], aborts: list[int], interrupted: bool
) -> None:
    engine, executor = make_engine(**options)  # type: ignore[arg-type]
    if interrupted:
        executor.fail_at = 3
    outputs = {}
    step = 0
    while step <= 12 or engine.has_unfinished:
        for i, (prompt, count, arrival) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(i), prompt, greedy(count))
        if step in (5, 9):
            for i in aborts:
                aborted = engine.abort(str(i))
                if aborted is not None:
                    outputs[str(i)] = aborted
        try:
            deltas = engine.step()
        except KeyboardInterrupt:
            executor.fail_at = None
            deltas = []
        outputs |= {delta.request_id: delta.output for delta in deltas if delta.output is not None}
        assert engine.check_integrity() == []
        assert len(engine.scheduler.running) <= options["max_num_seqs"]  # type: ignore[operator]
        step += 1
        assert step < 3000, "no progress"
    assert engine.scheduler.block_manager.num_active_blocks == 0
    assert engine.scheduler.block_manager._being_computed == {}
    for batch in executor.batches:
        assert sum(batch.query_lens) <= options["max_num_batched_tokens"]  # type: ignore[operator]
    assert len(outputs) == len(requests)
    for i, (prompt, count, _) in enumerate(requests):
        sample = outputs[str(i)].outputs[0]
        expected = expected_tokens(prompt, count, VOCAB)
        assert sample.token_ids == expected[: len(sample.token_ids)]
        if sample.finish_reason != "abort":
            assert (sample.finish_reason, len(sample.token_ids)) == ("length", count)


def samples_of_one_request_equal_separate_requests(prompt: list[int], n: int, options: dict[str, object]) -> None:
    engine, _ = make_engine(**options)  # type: ignore[arg-type]
    engine.add_request("r", prompt, greedy(5, n=n))
    output = run(engine)["r"]
    assert [sample.token_ids for sample in output.outputs] == [expected_tokens(prompt, 5, VOCAB)] * n
    assert [sample.index for sample in output.outputs] == list(range(n))
    assert output.usage.completion_tokens == 5 * n


def stops_are_exact_with_and_without_overlap(
    requests: list[tuple[list[int], int, int]], options: dict[str, object], eos: frozenset[int]
) -> None:
    engine, _ = make_engine(eos=eos, **options)  # type: ignore[arg-type]
    for i, (prompt, count, _) in enumerate(requests):
        engine.add_request(str(i), prompt, greedy(count))
    for i, output in run(engine).items():
        prompt, count, _ = requests[int(i)]
        expected = expected_tokens(prompt, count, VOCAB)
        stop = next((k for k, token in enumerate(expected) if token in eos), None)
        sample = output.outputs[0]
        assert sample.token_ids == (expected if stop is None else expected[: stop + 1])
        assert sample.finish_reason == ("length" if stop is None else "stop")


STRATEGIES = {
    tokens_do_not_depend_on_the_schedule: (
        workloads(),
        engine_options(),
        st.lists(st.integers(0, 8), max_size=3),
        st.booleans(),
    ),
    samples_of_one_request_equal_separate_requests: (
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20),
        st.integers(2, 6),
        engine_options(),
    ),
    stops_are_exact_with_and_without_overlap: (
        workloads(),
        engine_options(),
        st.frozensets(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    ),
}


def check(property_: Callable[..., None], examples: int) -> None:
    """Run one of the properties above on so many random cases, the same ones each time."""
    given_ = given(*STRATEGIES[property_])(property_)
    settings(max_examples=examples, deadline=None, derandomize=True)(given_)()
