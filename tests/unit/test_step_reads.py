"""What steps read of the KV cache, as their events say: it depends on the tokens, not on the schedule."""

from __future__ import annotations

import pytest
from engines import greedy, make_engine, run


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["mixed", "prefill-first"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_context_and_pairs_add_up_to_the_triangles_of_the_sequences(
    overlap: bool, policy: str, chunk: int | None
) -> None:
    engine, _ = make_engine(overlap=overlap, policy=policy, max_prefill_chunk=chunk, enable_prefix_caching=False)
    events = engine.events.subscribe()
    lengths = {"a": (7, 5), "b": (12, 1), "c": (30, 9)}
    for name, (prompt, output) in lengths.items():
        engine.add_request(name, list(range(prompt)), greedy(output))
    run(engine)
    seen = events.drain()
    assert sum(event.prefill_pairs for event in seen) == sum(p * (p + 1) // 2 for p, _ in lengths.values())
    # The first output token comes from the prefill; each further one reads all before it and itself.
    assert sum(event.decode_context for event in seen) == sum(
        sum(range(p + 1, p + n)) for p, n in lengths.values()
    )  # fmt: skip


def test_tokens_found_in_the_cache_are_read_but_not_computed() -> None:
    engine, _ = make_engine(block_size=4)
    engine.add_request("first", list(range(10)), greedy(1))
    run(engine)
    events = engine.events.subscribe()
    engine.add_request("second", list(range(10)), greedy(1))
    run(engine)
    [event] = [event for event in events.drain() if event.prefill_tokens]
    assert (event.cached_tokens, event.prefill_tokens) == (8, 2)
    assert event.prefill_pairs == 9 + 10
